"""The process that suspends or resumes one attempt: it calls drivers, which may hang.

It holds the attempt's lock file as long as it lives, so that two never work on the same attempt. It answers with one
line, as soon as a program has parked its memory, or with a failure at its time limit; when the driver returns later, it
undoes the change. It outlives the daemon and finishes. If it is killed, the next helper can finish its work."""

import contextlib
import os
import sys
import threading
import time
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.config import simulated_devices
from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.suspend.ask_to_park import find_registered
from gpuyard.engines.suspend.drivers import CannotSuspend, Cuda, DriverError, NoDriver, Simulated
from gpuyard.engines.suspend.move_memory import Driver, MemoryMover, Trouble
from gpuyard.model.job import Attempt
from gpuyard.ports import SuspendResult
from gpuyard.system.file_locks import hold_lock_file


class Order(Struct, frozen=True, kw_only=True):
    """What the helper shall do. `daemon` is the sender's pid; it never counts as a process of the attempt."""

    attempt: Attempt
    queue: str
    lock: str
    daemon: int
    is_resumption: bool
    needs_mb: dict[str, float] = {}
    mutexes: tuple[str, ...] = ()
    limit_s: float
    parks_within_s: float

    def result(self, **fields: Any) -> SuspendResult:
        job_id, number = self.attempt.job_id, self.attempt.number
        return SuspendResult(job_id=job_id, attempt=number, is_resumed=self.is_resumption, **fields)


class _Reply:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._is_sent = self.has_given_up = self._is_working = False
        self._timer: threading.Timer | None = None
        self.set_limit(order.limit_s)

    def send(self, answer: SuspendResult, *, gives_up: bool = False) -> bool:
        """Return False if another answer was sent before."""
        with self._lock:
            is_first, self._is_sent = not self._is_sent, True
            self.has_given_up = self.has_given_up or (is_first and gives_up)
        if is_first:
            seconds = round(time.monotonic() - self._started, 3)
            with contextlib.suppress(OSError):  # the daemon is gone
                os.write(1, msgspec.json.encode(msgspec.structs.replace(answer, seconds=seconds)) + b"\n")
        return is_first

    def start_work(self) -> None:
        """Note that from now on there is something to undo."""
        with self._lock:
            self.check()
            self._is_working = True

    def check(self) -> None:
        if self.has_given_up:
            raise Trouble("it took too long")

    def set_limit(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        waited = f"{time.monotonic() - self._started:.0f} s"
        text = f"the driver did not answer for {waited}; undone as soon as it answers"
        text = text if self._is_working else f"another helper has been working on it for {waited}"
        if self.send(self._order.result(is_done=False, text=text), gives_up=True) and not self._is_working:
            os._exit(0)


def main(arguments: list[str]) -> None:
    order = msgspec.json.decode(arguments[0], type=Order)
    reply = _Reply(order)
    with hold_lock_file(order.lock):
        try:
            reply.start_work()
            mover = _mover(order, reply)
            if order.is_resumption:
                mover.resume(order.needs_mb)
            else:
                mover.suspend()
        except Trouble as trouble:
            reply.send(order.result(is_done=False, is_ruined=trouble.is_ruined, text=str(trouble)))
            return
        except DriverError as error:
            reply.send(order.result(is_done=False, text=str(error)))
            return
        if not reply.send(_success(order, mover)) and reply.has_given_up:
            with contextlib.suppress(Trouble):  # the answer was sent already, and the next helper finds this trouble
                if order.is_resumption:
                    mover.undo_resume()
                else:
                    mover.undo_suspend()


def _success(order: Order, mover: MemoryMover) -> SuspendResult:
    return order.result(is_done=True, text=mover.not_parked, held_mb=mover.held_mb, parked_mb=mover.parked_mb)


def _mover(order: Order, reply: _Reply) -> MemoryMover:
    is_simulated, mutexes = simulated_devices() is not None, order.mutexes
    try:
        own = Simulated() if is_simulated else Cuda(order.parks_within_s)
        for device_id in order.attempt.devices:
            own.check(device_id)
        driver: Driver = own
    except CannotSuspend as error:
        driver = NoDriver(str(error))
    used_mb = sum(driver.used_mb(device_id) or 0.0 for device_id in order.attempt.devices)
    # A checkpoint ran at 1,500 MB/s on an H200; slow or swapping host memory is slower.
    reply.set_limit(order.limit_s + (used_mb + sum(order.needs_mb.values())) / 200.0)
    return MemoryMover(
        driver,
        lambda: process_tree.ProcessTable(order.queue, order.daemon).of(order.attempt),
        lambda processes: find_registered(order.queue, order.attempt.key, processes, order.parks_within_s),
        devices=order.attempt.devices,
        mutexes=(*mutexes, str(Simulated().mutex)) if is_simulated else mutexes,
        check=reply.check,
        tell_parked=lambda parked: reply.send(_success(order, parked)),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
