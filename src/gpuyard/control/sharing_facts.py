"""What is known about jobs that share devices: the loads of those that run, and how many share how many devices."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.numbers import MOST_PER_DEVICE
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.sharing import assumed_load, depth_limit

# With this least gain, memory alone decides which jobs share a device.
_MEMORY_ALONE_PERCENT = -100.0


def lease_loads(transitions: JobTransitions, now: float) -> dict[str, float]:
    """Return the load of each running job by its lease, as far as it was measured."""
    found: dict[str, float] = {}
    for live in transitions.live.values():
        attempt = live.attempt
        if attempt.lease_id is not None and attempt.usage is not None:
            found[attempt.lease_id] = assumed_load(attempt.usage.load_percent, attempt.ran_s(now))
    return found


def packing_now(transitions: JobTransitions, packing: Packing, queues: Sequence[LaneQueue], devices: int) -> Packing:
    """Return the limits of sharing with the present number of jobs for the usable devices."""
    least = packing.min_gain_percent
    if least is None or least <= _MEMORY_ALONE_PERCENT or devices < 2:
        return packing
    jobs, most = sum(len(each.attempt.devices) for each in transitions.live.values()), MOST_PER_DEVICE * devices
    waiting = (queue.lane for queue in queues if not queue.lane.resumes and not queue.lane.engine)
    queued = transitions.store.count_queued([lane.id for lane in waiting if lane.need.devices], most)
    return replace(packing, depth=depth_limit(jobs + queued, devices))
