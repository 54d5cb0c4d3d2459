"""Narrow a need to the devices on which its batch's gates, or the limit of its tag, allow a start."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.batch_pacing import PaceState, device_refusal
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.plan import PlannerView
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.running_counts import RunningCounts, limit_reached
from gpuyard.core.scheduling.tag_sharing import devices_with_fewest, spread_need
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind

# The needs to try, in order; where there is none to try, the reasons.
Variants = tuple[Sequence[Need], tuple[Reason, ...]]


def gated_variants(lane: Lane, need: Need, placement: PlacementState, view: PlannerView) -> Variants:
    """Return the need on the devices that the gates of its batch leave open."""
    assert lane.pace is not None
    assert lane.group is not None
    need = replace(need, ignores_foreign_load=lane.pace.max_gpu_percent is not None)
    pace_state = view.pace_states.get(lane.group, PaceState())
    devices = list(placement.suitable_devices(need))
    refusals = {each.device.id: device_refusal(lane.pace, pace_state, each, need, view.now) for each in devices}
    left = tuple(device_id for device_id, reason in refusals.items() if reason is None)
    if len(left) < need.devices <= len(devices):
        return (need,), tuple(reason for reason in refusals.values() if reason is not None)
    return (replace(need, only=left) if len(left) < len(devices) else need,), ()


def spread_variants(lane: Lane, need: Need, placement: PlacementState, counts: RunningCounts) -> Variants:
    """Return the need on the devices that have fewer jobs of the tag than its limit, the emptiest first."""
    assert lane.tag_sharing is not None
    devices = list(placement.suitable_devices(need))
    if len(devices) < need.devices:
        return (need,), ()
    on_device = counts.by_tag_and_device.setdefault(lane.tag, {})
    variants = spread_need(need, lane.tag_sharing, devices, on_device)
    if variants:
        return variants, ()
    most = lane.tag_sharing.most_per_device
    if need.devices > 1:  # hold its places, or jobs that need one device would take each as it becomes free
        on_device.update(dict.fromkeys(devices_with_fewest(devices, on_device, need.devices), most))
    return (need,), (limit_reached(ReasonKind.TAG_LIMIT, "tasks of its workspace on one GPU", most),)
