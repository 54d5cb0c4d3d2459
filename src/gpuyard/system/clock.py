"""Clocks of this machine. Which one to use for what: ADR 47.

- The wall clock, for times that people read. It jumps when it is set.
- `monotonic`, for durations within one process. It does not count the time in which the machine is suspended.
- `since_boot`, for times that several processes compare. It counts the time suspended."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuyard.system.processes import boot_id

if TYPE_CHECKING:
    from gpuyard.model.queue_time import QueueTime

# Without CLOCK_BOOTTIME, on macOS, CLOCK_MONOTONIC is the one that counts the time asleep.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot() -> float:
    """Return seconds since this machine booted, including the time suspended; the same in all of its processes."""
    return time.clock_gettime(_SINCE_BOOT)


def read_clocks(other: Callable[[], float]) -> tuple[float, float]:
    """Return `since_boot` and another clock, both read at the same moment. A process may be stopped in between, which
    would look as if a clock had been set."""
    while True:
        before, read, after = since_boot(), other(), since_boot()
        if after - before < 0.1:
            return before, read


def wall_time_of(at: float) -> float:
    """Return the wall time of a time of `since_boot`, by the wall clock as it is set now."""
    now, wall = read_clocks(time.time)
    return wall - (now - at)


def asleep() -> float:
    """Return for how long this machine has been suspended since it booted, plus an amount that never changes."""
    now, awake = read_clocks(time.monotonic)
    return now - awake


def boot_name() -> str:
    """Return what identifies this boot and time namespace, in which `since_boot` may have another start; empty if that
    is unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    return f"{boot_id()} {namespace}" if boot_id() is not None else ""


class SystemClock:
    """The wall clock as `ports.Clock`, for programs that only measure and show."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def asleep(self) -> float:
        return asleep()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def to_wall(self, at: float) -> float:
        return at

    def from_wall(self, at: float) -> float:
        return at


class QueueClock(SystemClock):
    """The clock of a queue: `now` is queue time (model/queue_time.py)."""

    def __init__(self, record: "QueueTime", on_step: Callable[[float], None] = lambda _: None) -> None:
        """`on_step` is called with the seconds by which the wall clock was stepped."""
        self.record = record
        self._on_step = on_step

    def now(self) -> float:
        return self.record.offset + since_boot()

    def to_wall(self, at: float) -> float:
        self.look()
        return self.record.to_wall(at)

    def from_wall(self, at: float) -> float:
        self.look()
        return self.record.from_wall(at)

    def look(self) -> None:
        """Notice a step of the wall clock."""
        before, self.record = self.record, self.record.noticing(*read_clocks(time.time))
        if self.record is not before:
            self._on_step(self.record.shift - before.shift)
