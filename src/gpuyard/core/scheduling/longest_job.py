"""Which running jobs decide when all work is over: those with more time left than all other work needs elsewhere.

The other work is what running jobs have left and what waits, spread evenly over the devices that the job does not hold.
If the job takes longer than that, sharing its device cannot end the work sooner, only later. On a machine whose devices
are all held by the job there is no elsewhere, and the job decides nothing. More work usually comes before it ends, and
has to wait for it then: so only a job that has FAR_LONGER times as much left as others usually take is spared.

The time left of a running job is its likely duration less what it has run. A job that has run for longer than that, or
whose duration is unknown, is expected to run for as long again. Jobs with less than LEAST_LEFT_S left are not worth it.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

LEAST_LEFT_S = 60.0
FAR_LONGER = 20.0


class RunningWork(Struct, frozen=True, kw_only=True):
    lease_id: str
    devices: int
    ran_s: float
    likely_s: float | None = None

    @property
    def left_s(self) -> float:
        left_s = (self.likely_s or 0.0) - self.ran_s
        return left_s if left_s > 0.0 else self.ran_s


class WaitingWork(Struct, frozen=True, kw_only=True):
    """`device_s` are the device-seconds of all waiting jobs, `durations_s` the usual durations of some of them."""

    device_s: float = 0.0
    durations_s: Sequence[float] = ()


def find_longest(
    running: Iterable[RunningWork], waiting: Callable[[float], WaitingWork], devices: int
) -> dict[str, float]:
    """Return the leases of the jobs that decide when all is over, with the seconds that each has left.

    waiting: returns the waiting work, given the duration that jobs of unknown duration count with. It is called only if
    the running work alone leaves a job to decide.
    devices: how many can be used.
    """
    works = sorted([(work.left_s, work) for work in running], key=lambda each: -each[0])
    if not works or works[0][0] < LEAST_LEFT_S:
        return {}
    total_s = sum([left_s * work.devices for left_s, work in works])
    candidates = [(left_s, work) for left_s, work in works if _decides(left_s, work.devices, total_s, devices)]
    if not candidates:
        return {}
    totals_s = [work.ran_s + left_s for left_s, work in works]
    found = waiting(sum(totals_s) / len(works))
    total_s += found.device_s
    usual_s = statistics.median([*totals_s[1:], *found.durations_s] or [math.inf])
    return {
        work.lease_id: left_s
        for left_s, work in candidates
        if _decides(left_s, work.devices, total_s, devices) and left_s >= FAR_LONGER * usual_s
    }


def _decides(left_s: float, held: int, total_s: float, devices: int) -> bool:
    """Return whether a job that holds so many of the devices has more left than all other work needs elsewhere."""
    return left_s >= LEAST_LEFT_S and left_s * (devices - held) > total_s - left_s * held
