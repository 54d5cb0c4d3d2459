"""Slices: how many of the next jobs of a lane a start takes along, to run one after the other on its lease.

A step between two jobs takes longer than a short job. So where jobs are expected to end within milliseconds, a start
gets many of them at once. All of a slice are expected to last half a second at most, and none starts a second after the
slice did: nobody waits longer for what it holds.

A lane gets slices only while nobody else waits with an equal or a higher claim, and nothing but the lack of free places
decides when its jobs start.
"""

from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.world import World

# Half of the longest time that an urgent job may wait: estimates of short jobs are off by a factor of two.
_EXPECTED_S = 0.5
# After this time the daemon takes back what has not started.
LONGEST_S = 1.0
# Jobs that the starts of one plan take along: to record and launch them takes some 20 ms.
MOST = 96
# What a keeper needs for a job that takes no time.
_LEAST_S = 0.001


def may_slice(lane: Lane, plan: Plan, world: World) -> bool:
    """Return whether the starts of a lane may take along jobs that wait."""
    is_special = lane.engine or lane.resumes or lane.preempts or lane.writes_files
    is_paced = lane.pace is not None or lane.tag_sharing is not None or lane.stagger_s
    if is_special or is_paced or plan.preempts or world.closed_reasons or world.start_caps:
        return False
    takes_lease = lane.need.devices or lane.need.host is not None or lane.sizes_each
    if takes_lease and any(ticket.priority > lane.priority for ticket in world.tickets):
        return False
    return all(each.lane.priority < lane.priority for each in plan.waiting if each.lane.id != lane.id)


def slice_length(likely_s: float | None, waiting: int, places: int, starts: int = 1) -> int:
    """Return how many jobs each of these starts takes along, of which each takes `likely_s`. What waits is shared among
    all places where jobs run, so that these end at about the same time."""
    if likely_s is None:
        return 0
    return min(MOST // starts, int(_EXPECTED_S / max(likely_s, _LEAST_S)) - 1, waiting // max(1, places))
