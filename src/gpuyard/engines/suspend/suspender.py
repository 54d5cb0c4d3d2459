"""Suspends and resumes attempts of the local engine, each by a helper process (`checkpoint.py`).

Nothing here calls a driver, and nothing waits for one: the helper says how it came out, and `moved` tells. A helper
that dies is followed by another one, once, which finishes what it finds.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuyard.config import simulated_devices
from gpuyard.core.job.job import Attempt
from gpuyard.core.snapshot import Device, Snapshot, Vendor
from gpuyard.engines.local import process_tree
from gpuyard.engines.suspend.cuda_driver import ASK
from gpuyard.engines.suspend.helper_process import Answer, Order
from gpuyard.ports import SuspendResult

_HELPER = (sys.executable, "-P", "-m", "gpuyard.engines.suspend.helper_process")
_MOST_TRIES = 2
_CHUNK = 1 << 16
_ASKS_WITHIN_S = 5.0
_ANSWERS_MOSTLY_WITHIN_S = 0.2
_UNANSWERED = "the NVIDIA driver does not answer"
_ASK_AGAIN_AFTER_S = 60.0
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_MARKS = (process_tree.QUEUE, "GPUYARD_JOB_ID", "GPUYARD_ATTEMPT")


class _Helper:
    """One at work, and what it has said."""

    def __init__(self, order: Order, tries: int) -> None:
        self.order = order
        self.tries = tries
        self.answer: Answer | None = None
        self.said = b""
        self.is_gone = False
        reading, writing = os.pipe()
        try:
            os.set_blocking(reading, False)
            self.pid = _spawn(order, writing)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.pipe = reading

    def listen(self) -> None:
        try:
            while news := os.read(self.pipe, _CHUNK):
                self.said += news
        except BlockingIOError:
            return
        self.is_gone = True

    def close(self) -> None:
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0 if self.is_gone else os.WNOHANG)


class LocalSuspender:
    """Implements `ports.Suspender`, for one thread of one process at a time.

    An event loop can watch `fileno()`: it is readable while `moved` has something to do or to tell.
    """

    def __init__(
        self,
        folder: Path,
        queue: str,
        *,
        mutexes: Sequence[Path] = (),
        patience_s: float = 60.0,
        lock_timeout_s: float = 10.0,
    ) -> None:
        """`folder` is the suspender's own; `queue` names the engine's. Nobody is stopped while he holds one of the
        `mutexes`. A helper has `patience_s`, and as long again as the memory takes; programs have `lock_timeout_s`
        to come to a pause."""
        self._folder = folder.absolute()
        self._queue = queue
        self._mutexes = tuple(str(path) for path in mutexes)
        self._patience_s = patience_s
        self._lock_timeout_s = lock_timeout_s
        self._driver = _NvidiaDriver()
        self._helpers: dict[int, _Helper] = {}
        self._news: list[SuspendResult] = []
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        self._bell = -1 if self._poll is None else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._poll is not None:
            self._poll.register(self._bell, select.EPOLLIN)

    def fileno(self) -> int:
        """-1 where the system cannot watch several at once: there, ask `moved` now and then."""
        return -1 if self._poll is None else self._poll.fileno()

    def close(self) -> None:
        """Helpers at work finish it; nobody here will hear of it."""
        for helper in list(self._helpers.values()):
            self._part_with(helper)
        if self._poll is not None:
            self._poll.close()
            os.close(self._bell)

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        if not attempt.devices:
            return "it uses no device"
        for device_id in attempt.devices:
            device = snapshot.device(device_id)
            refusal = f"{device_id} is not seen now" if device is None else self._refusal_on(device)
            if refusal is not None:
                return refusal
        return None

    def _refusal_on(self, device: Device) -> str | None:
        if device.vendor is Vendor.SIMULATED:
            return None
        if device.vendor is not Vendor.NVIDIA:
            return f"{device.id} is no NVIDIA device: of the others, no driver can move a program's memory away"
        if device.parent is not None:
            return f"{device.id} is a part of a card (MIG), whose memory the driver cannot move away"
        return self._driver.refusal()

    def suspend(self, attempt: Attempt) -> None:
        self._begin(self._order(attempt, is_resumption=False))

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        self._begin(msgspec.structs.replace(self._order(attempt, is_resumption=True), needs_mb=dict(needs_mb)))

    def _order(self, attempt: Attempt, *, is_resumption: bool) -> Order:
        return Order(
            attempt=attempt,
            queue=self._queue,
            lock=f"{self._folder}/{attempt.key}.lock",
            daemon=os.getpid(),
            is_resumption=is_resumption,
            is_simulated=simulated_devices() is not None,
            mutexes=self._mutexes,
            patience_s=self._patience_s,
            lock_timeout_s=self._lock_timeout_s,
        )

    def _begin(self, order: Order, tries: int = 1) -> None:
        if any(_is_same(helper.order, order) and helper.answer is None for helper in self._helpers.values()):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            helper = _Helper(order, tries)
        except OSError as error:
            self._tell(order, text=f"no process can be started for it: {error.strerror}")
            return
        self._helpers[helper.pipe] = helper
        if self._poll is not None:
            self._poll.register(helper.pipe, select.EPOLLIN)

    def moved(self) -> list[SuspendResult]:
        for helper in self._ready():
            self._hear(helper)
        news, self._news = self._news, []
        return news

    def _ready(self) -> list[_Helper]:
        if self._poll is None:
            return list(self._helpers.values())
        ready = [descriptor for descriptor, _ in self._poll.poll(0)]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return [self._helpers[descriptor] for descriptor in ready if descriptor != self._bell]

    def _hear(self, helper: _Helper) -> None:
        helper.listen()
        if helper.answer is None:
            helper.answer = _answer_in(helper.said)
            if helper.answer is not None:
                self._news.append(_told(helper.order, helper.answer))
        if helper.is_gone:
            self._part_with(helper)
            if helper.answer is None:
                self._follow(helper)

    def _part_with(self, helper: _Helper) -> None:
        if self._poll is not None:
            # To close it is not enough while anybody looks at our descriptors in /proc, as every helper does.
            self._poll.unregister(helper.pipe)
        del self._helpers[helper.pipe]
        helper.close()

    def _follow(self, helper: _Helper) -> None:
        if helper.tries < _MOST_TRIES:
            self._begin(helper.order, helper.tries + 1)
            return
        last = helper.said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        self._tell(helper.order, text=f"its helper died twice{': ' if last else ''}{last}")

    def _tell(self, order: Order, text: str) -> None:
        """Of what no helper will wake anybody for."""
        self._news.append(_told(order, Answer(is_done=False, text=text, seconds=0.0)))
        if self._poll is not None:
            os.eventfd_write(self._bell, 1)


class _NvidiaDriver:
    """Whether it can move memory at all. It is asked in another process, as it may hang, by a thread that waits for it,
    and once, as it stays as it is; where it did not answer, again after a while."""

    def __init__(self) -> None:
        self._refusal: str | None = _UNANSWERED
        self._asks_at = 0.0

    def refusal(self) -> str | None:
        """As far as is known by now."""
        if time.monotonic() >= self._asks_at:
            self._asks_at = float("inf")
            thread = threading.Thread(target=self._ask, name="gpuyard-driver", daemon=True)
            thread.start()
            thread.join(_ANSWERS_MOSTLY_WITHIN_S)
        return self._refusal

    def _ask(self) -> None:
        try:
            asked = subprocess.run(
                [sys.executable, "-I", "-S", "-c", ASK], capture_output=True, text=True, timeout=_ASKS_WITHIN_S,
                check=False,
            )  # fmt: skip
            self._refusal = asked.stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            self._refusal = _UNANSWERED
            self._asks_at = time.monotonic() + _ASK_AGAIN_AFTER_S


def _spawn(order: Order, pipe: int) -> int:
    """In a session of its own, with the daemon's environment, but never taken for a process of a job that may have
    started the daemon."""
    environment = {name: value for name, value in os.environ.items() if name not in _MARKS}
    nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.posix_spawn(
            _HELPER[0],
            (*_HELPER, msgspec.json.encode(order).decode()),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, source, target) for source, target in ((nowhere, 0), (pipe, 1), (1, 2))
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_SIGNALS,
        )
    finally:
        os.close(nowhere)


def _is_same(one: Order, other: Order) -> bool:
    return (one.attempt.key, one.is_resumption) == (other.attempt.key, other.is_resumption)


def _answer_in(said: bytes) -> Answer | None:
    for line in said.split(b"\n")[:-1]:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=Answer)
    return None


def _told(order: Order, answer: Answer) -> SuspendResult:
    return SuspendResult(
        job_id=order.attempt.job_id,
        attempt=order.attempt.number,
        is_resumed=order.is_resumption,
        is_done=answer.is_done,
        is_ruined=answer.is_ruined,
        text=answer.text,
        seconds=answer.seconds,
        held_mb=answer.held_mb,
    )
