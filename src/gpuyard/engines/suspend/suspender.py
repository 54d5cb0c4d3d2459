"""Suspends and resumes attempts of the local engine, each by a helper process (`helper_program.py`).

Nothing here calls a driver or waits for one: the helper reports the result, and `moved` returns it. If a helper dies, a
second one finishes its work.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuyard.engines.common.spawn_program import spawn_in_session
from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.model.job import Attempt
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.ports import SuspendResult
from gpuyard.system.parking_protocol import registered, remove_dead, why_incomplete
from gpuyard.system.system_limits import passes
from gpuyard.system.wakeable_poll import WakeablePoll

if TYPE_CHECKING:
    from gpuyard.engines.suspend.helper_program import Order  # the daemon starts without what a helper needs

_UNANSWERED = "the NVIDIA driver does not answer"
_PARKABLE = "; a PyTorch program could park its memory itself, with gpuyard.torch.parkable"


class _Helper:
    def __init__(self, order: "Order", tries: int) -> None:
        self.order, self.tries = order, tries
        self.answer: SuspendResult | None = None
        self.output = b""
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

    def read(self) -> None:
        try:
            while received := os.read(self.pipe, 1 << 16):
                self.output += received
            self.is_gone = True
        except BlockingIOError:
            pass
        for line in self.output.split(b"\n")[:-1]:
            with contextlib.suppress(msgspec.DecodeError):
                self.answer = self.answer or msgspec.json.decode(line, type=SuspendResult)

    def close(self) -> None:
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0 if self.is_gone else os.WNOHANG)


class LocalSuspender:
    """Implements `ports.Suspender`, for one thread of one process at a time. An event loop can watch `fileno()`: it is
    readable when `moved` should be called."""

    def __init__(
        self,
        folder: Path,
        queue: str,
        *,
        mutexes: Sequence[Path] = (),
        limit_s: float = 60.0,
        parks_within_s: float = 10.0,
    ) -> None:
        """`queue` is the folder of the local engine. No process is stopped while it holds one of the files `mutexes`.
        `limit_s` is a helper's time limit, besides the time that copying the memory takes. Programs have
        `parks_within_s` to pause their work on the device, or to come to the end of their step."""
        self._folder, self._queue = folder.absolute(), queue
        self._mutexes = tuple(map(str, mutexes))
        self._limit_s, self._parks_within_s = limit_s, parks_within_s
        self._driver = _NvidiaDriver()
        self._helpers: dict[int, _Helper] = {}
        self._results: list[SuspendResult] = []
        self._poll = WakeablePoll()
        remove_dead(queue)

    def fileno(self) -> int:
        """-1 if the system has no epoll: then call `moved` now and then."""
        return self._poll.fileno()

    def close(self) -> None:
        """Stop listening. Helpers that run finish their work."""
        for helper in list(self._helpers.values()):
            self._drop(helper)
        self._poll.close()

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        if not attempt.devices:
            return "it uses no device"
        found = [snapshot.device(device_id) for device_id in attempt.devices]
        if None in found:
            return f"{attempt.devices[found.index(None)]} is not visible now"
        why_not = next(filter(None, (self._refusal_on(device) for device in found if device is not None)), None)
        return None if why_not is None or self.can_park(attempt) else why_not

    def _refusal_on(self, device: Device) -> str | None:
        if device.vendor not in (Vendor.NVIDIA, Vendor.SIMULATED):
            how = _PARKABLE if device.vendor is Vendor.AMD else ""
            return f"{device.id} is no NVIDIA device, and only NVIDIA's driver can suspend programs{how}"
        if device.is_simulated:
            return None
        if device.parent is not None:
            return f"{device.id} is a MIG device, and the driver cannot suspend programs on it{_PARKABLE}"
        return self._driver.refusal()

    def can_park(self, attempt: Attempt) -> bool:
        found = registered(self._queue, attempt.key)
        return bool(found) and why_incomplete(found) is None

    def suspend(self, attempt: Attempt) -> None:
        self._order(attempt, {}, is_resumption=False)

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        self._order(attempt, needs_mb, is_resumption=True)

    def _order(self, attempt: Attempt, needs_mb: Mapping[str, float], *, is_resumption: bool) -> None:
        from gpuyard.engines.suspend.helper_program import Order

        lock = f"{self._folder}/{attempt.key}.lock"
        order = Order(attempt=attempt, queue=self._queue, lock=lock, daemon=os.getpid(), is_resumption=is_resumption,
                      needs_mb=dict(needs_mb), mutexes=self._mutexes, limit_s=self._limit_s,
                      parks_within_s=self._parks_within_s)  # fmt: skip
        self._start(order)

    def _start(self, order: "Order", tries: int = 1) -> None:
        move = (order.attempt.key, order.is_resumption)
        working = (helper.order for helper in self._helpers.values() if helper.answer is None)
        if any((other.attempt.key, other.is_resumption) == move for other in working):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            helper = _Helper(order, tries)
        except OSError as error:
            self._fail(order, text=f"no process can be started for it: {error.strerror}", may_pass=passes(error))
            return
        self._helpers[helper.pipe] = helper
        self._poll.watch(helper.pipe)

    def moved(self) -> list[SuspendResult]:
        for helper in self._poll.ready(self._helpers):
            was_answered = helper.answer is not None
            helper.read()
            if helper.answer is not None and not was_answered:
                self._results.append(helper.answer)
            if helper.is_gone:
                self._drop(helper)
            if helper.is_gone and helper.answer is None and helper.tries < 2:
                self._start(helper.order, helper.tries + 1)
            elif helper.is_gone and helper.answer is None:
                last = helper.output.decode("utf-8", "replace").strip().rpartition("\n")[2]
                self._fail(helper.order, text=f"its helper died twice{': ' if last else ''}{last}")
        results, self._results = self._results, []
        return results

    def _drop(self, helper: _Helper) -> None:
        self._poll.forget(helper.pipe)
        del self._helpers[helper.pipe]
        helper.close()

    def _fail(self, order: "Order", text: str, *, may_pass: bool = False) -> None:
        self._results.append(order.result(is_done=False, text=text, may_pass=may_pass))
        self._poll.wake()


class _NvidiaDriver:
    """Checks whether the driver can suspend at all. A separate process asks the driver, which may hang, and a thread
    waits for it. The answer never changes, so it is asked once; without an answer, again after 60 s."""

    def __init__(self) -> None:
        self._refusal: str | None = _UNANSWERED
        self._check_at = 0.0

    def refusal(self) -> str | None:
        if time.monotonic() >= self._check_at:
            self._check_at = float("inf")
            thread = threading.Thread(target=self._check, name="gpuyard-driver", daemon=True)
            thread.start()
            thread.join(0.2)  # it usually answers within that
        return self._refusal

    def _check(self) -> None:
        from gpuyard.engines.suspend.drivers import CHECK_SUPPORT

        try:
            checked = subprocess.run(
                [sys.executable, "-I", "-S", "-c", CHECK_SUPPORT], capture_output=True, text=True,
                timeout=5.0, check=False,
            )  # fmt: skip
            self._refusal = checked.stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            self._refusal = _UNANSWERED
            self._check_at = time.monotonic() + 60.0


def _spawn(order: "Order", pipe: int) -> int:
    """Start a helper without the variables that mark a job: a job may have started the daemon, but not the helper."""
    marks = (process_tree.QUEUE, "GPUYARD_JOB_ID", "GPUYARD_ATTEMPT")
    environment = {name: value for name, value in os.environ.items() if name not in marks}
    command = (
        sys.executable,
        "-P",
        "-m",
        "gpuyard.engines.suspend.helper_program",
        msgspec.json.encode(order).decode(),
    )
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return spawn_in_session(command[0], command, environment, ((null, 0), (pipe, 1), (1, 2)))
    finally:
        os.close(null)
