"""Times of the queue as clients get them."""

from typing import overload

from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.loop import SchedulerLoop


@overload
def wall_time(scheduler: SchedulerLoop, at: float) -> str: ...


@overload
def wall_time(scheduler: SchedulerLoop, at: float | None) -> str | None: ...


def wall_time(scheduler: SchedulerLoop, at: float | None) -> str | None:
    """Return a time of the queue as a time of day: in UTC, with milliseconds."""
    return None if at is None else iso_time(scheduler.clock.to_wall(at))
