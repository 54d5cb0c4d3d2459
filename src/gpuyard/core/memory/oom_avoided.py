"""Whether a job waits for memory that is free at this moment and promised to others: whoever went by the momentary
reading alone would start it, and one of them would run out."""

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.core.snapshot import Snapshot

_PROMISED = frozenset({ReasonKind.NO_ROOM, ReasonKind.LEASED})


def would_have_run_out(hold: WaitingJob, snapshot: Snapshot) -> bool:
    """Not where nobody knows what it needs, nor where it waits to be alone."""
    need = hold.need
    if not need.devices or need.required_mb is None or need.is_exclusive:
        return False
    promised = {reason.device_id for reason in hold.reasons if reason.kind in _PROMISED}
    roomy = _with_enough_free(need, need.required_mb, snapshot)
    # Without reasons nobody could have anything: leases fill every device, and the plan saves itself the words.
    return len(roomy) >= need.devices and not (hold.reasons and promised.isdisjoint(roomy))


def _with_enough_free(need: Need, memory_mb: float, snapshot: Snapshot) -> list[str]:
    return [
        device.id
        for device in snapshot.usable_devices()
        if device.memory_free_mb is not None
        and device.memory_free_mb >= memory_mb
        and check_suitable(need, device) is None
    ]
