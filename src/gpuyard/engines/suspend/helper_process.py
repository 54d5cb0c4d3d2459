"""The process that suspends or resumes one attempt: `python -P -m gpuyard.engines.suspend.helper_process ORDER`.

It has a session of its own, because it calls drivers, which may hang.

- It holds a lock file of the attempt's for as long as it lives, so that a helper that a dead daemon left behind and a
  new one never work on the same attempt at once.
- It answers with one line, even where the driver does not: after its patience is over it says so, and undoes what it
  did when the driver comes back, so that nothing happens to an attempt that nobody was told of.
- It outlives whoever started it, and finishes. Killed at any moment it leaves nothing that the next one cannot finish.
"""

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from gpuyard.core.job.job import Attempt
from gpuyard.engines.local import process_tree
from gpuyard.engines.suspend.cuda_driver import Cuda
from gpuyard.engines.suspend.move_memory import DriverError, MemoryMover, Trouble
from gpuyard.engines.suspend.simulated_driver import Simulated

# A checkpoint made 1,500 MB/s on an H200; where the host's memory is slow or swaps, less.
_SLOWEST_MB_PER_S = 200.0


class Order(Struct, frozen=True, kw_only=True):
    """`daemon` is who gives it, and no part of the attempt even where the attempt started it."""

    attempt: Attempt
    queue: str
    lock: str
    daemon: int
    is_resumption: bool
    needs_mb: dict[str, float] = {}
    is_simulated: bool = False
    mutexes: tuple[str, ...] = ()
    patience_s: float
    lock_timeout_s: float


class Answer(Struct, frozen=True, kw_only=True):
    is_done: bool
    is_ruined: bool = False
    text: str = ""
    seconds: float
    held_mb: dict[str, float] = {}


class _Mouth:
    """Speaks once: at the end of the work or at that of its patience, whatever comes first."""

    def __init__(self, patience_s: float) -> None:
        self._began = time.monotonic()
        self._turn = threading.Lock()
        self._is_silent = False
        self._is_at_work = False
        self._timer = self._timer_for(patience_s)

    def say(
        self, *, is_done: bool, is_ruined: bool = False, text: str = "", held_mb: dict[str, float] | None = None
    ) -> bool:
        """False where it is too late for that."""
        with self._turn:
            if self._is_silent:
                return False
            self._is_silent = True
        self._timer.cancel()
        self._write(is_done=is_done, is_ruined=is_ruined, text=text, held_mb=held_mb)
        return True

    def _write(
        self, *, is_done: bool, is_ruined: bool = False, text: str, held_mb: dict[str, float] | None = None
    ) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        answer = Answer(is_done=is_done, is_ruined=is_ruined, text=text, seconds=seconds, held_mb=held_mb or {})
        with contextlib.suppress(OSError):  # nobody is there any more
            os.write(1, msgspec.json.encode(answer) + b"\n")

    def begin(self) -> None:
        """From now on there is something to undo."""
        with self._turn:
            self.check()
            self._is_at_work = True

    def check(self) -> None:
        if self._is_silent:
            raise Trouble("it took too long")

    def wait_longer(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._timer_for(seconds)

    def _timer_for(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()
        return timer

    def _give_up(self) -> None:
        with self._turn:
            if self._is_silent:
                return
            self._is_silent = True
        waited = f"{time.monotonic() - self._began:.0f} s"
        if self._is_at_work:
            self._write(is_done=False, text=f"the driver did not answer for {waited}: it is undone as soon as it does")
        else:
            self._write(is_done=False, text=f"somebody else has been at work on it for {waited}")
            os._exit(0)


def main(words: list[str]) -> None:
    order = msgspec.json.decode(words[0], type=Order)
    mouth = _Mouth(order.patience_s)
    with _held(order.lock):
        try:
            mouth.begin()
            mover = _mover(order, mouth)
            if order.is_resumption:
                mover.resume(order.needs_mb)
            else:
                mover.suspend()
        except Trouble as trouble:
            mouth.say(is_done=False, is_ruined=trouble.is_ruined, text=trouble.text)
            return
        except DriverError as error:
            mouth.say(is_done=False, text=str(error))
            return
        if not mouth.say(is_done=True, held_mb=mover.held_mb):
            with contextlib.suppress(Trouble):  # nobody listens by now, and whoever asks next will be told
                _undo(order, mover)()


def _mover(order: Order, mouth: _Mouth) -> MemoryMover:
    driver = Simulated() if order.is_simulated else Cuda(order.lock_timeout_s)
    used_mb = sum(driver.used_mb(device_id) for device_id in order.attempt.devices)
    mouth.wait_longer(order.patience_s + (used_mb + sum(order.needs_mb.values())) / _SLOWEST_MB_PER_S)
    mutexes = (*order.mutexes, str(driver.mutex)) if isinstance(driver, Simulated) else order.mutexes
    return MemoryMover(
        driver,
        lambda: process_tree.processes_of(order.attempt, order.queue, order.daemon),
        devices=order.attempt.devices,
        mutexes=mutexes,
        check=mouth.check,
    )


def _undo(order: Order, mover: MemoryMover) -> Callable[[], None]:
    return mover.take_away if order.is_resumption else mover.put_back


@contextlib.contextmanager
def _held(path: str) -> Iterator[None]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # removed while we waited for it: others lock a new one by now
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
