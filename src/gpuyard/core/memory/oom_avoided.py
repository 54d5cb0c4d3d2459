"""Whether a job waits for memory that is free now but promised to others.

A scheduler that goes by free memory alone would start it, and one of the jobs would run out of memory.
"""

from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.core.snapshot import Snapshot

_PROMISED = frozenset({ReasonKind.NO_ROOM, ReasonKind.LEASED})


def would_have_run_out(job: WaitingJob, snapshot: Snapshot) -> bool:
    """Return False where the job's memory is unknown, or where it waits for a whole device."""
    need = job.need
    if not need.devices or need.required_mb is None or need.is_exclusive:
        return False
    promised = {reason.device_id for reason in job.reasons if reason.kind in _PROMISED}
    large_enough = [
        device.id
        for device in snapshot.usable_devices()
        if device.memory_free_mb is not None and device.memory_free_mb >= need.required_mb
        if check_suitable(need, device) is None
    ]
    # The planner gives no reasons where leases fill every device.
    return len(large_enough) >= need.devices and not (job.reasons and promised.isdisjoint(large_enough))
