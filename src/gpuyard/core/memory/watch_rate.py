"""Which devices are read often: those on which the memory of a first run grows, or has yet to be used, and those on
which another job grows beside a first run (`MemoryGuard.watched`).

Ten readings a second show a climb while there is still time to act (`memory_guard`). Once the memory of all first runs
on a device has been flat for a while, the usual rate is enough.
"""

from collections.abc import Iterable

from gpuyard.core.job.job import Attempt, Usage

READ_OFTEN_EVERY_S = 0.1
# Memory that has not grown for this long is flat.
UNGROWN_S = 5.0
# A program that has not used its device by then may never do so.
_UNUSED_S = 120.0
# Drivers round, and may count the context of a process.
_OVER = 1.05


def devices_to_watch(first_runs: Iterable[Attempt], now: float) -> frozenset[str]:
    """Return the ids of the devices that are read often. `first_runs` are running attempts whose need is unknown, or
    which hold more than they were expected to need."""
    return frozenset(device_id for attempt in first_runs if _is_watched(attempt, now) for device_id in attempt.devices)


def holds_more_than_reserved(attempt: Attempt) -> bool:
    """Return whether the attempt was measured to hold more than its declared or learned memory."""
    reserved, peak = attempt.reserved_mb, (attempt.usage or Usage()).peak_mb
    return reserved is not None and peak is not None and peak > reserved * _OVER


def _is_watched(attempt: Attempt, now: float) -> bool:
    ran_s, usage = attempt.ran_s(now), attempt.usage
    if usage is None or not usage.peaks_mb:
        return ran_s < _UNUSED_S
    return ran_s - usage.grew_at_s < UNGROWN_S
