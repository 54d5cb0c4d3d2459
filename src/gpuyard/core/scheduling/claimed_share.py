"""The share of a device that is claimed for a need."""

from msgspec.structs import replace

from gpuyard.core.lease import Need, Share
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.snapshot import Device


def claimed_share(need: Need, state: DeviceState) -> Share:
    share = share_of(need, state.device)
    hides_use = state.device.hides_processes and state.device.memory_used_mb is not None
    return replace(share, foreign_mb=state.foreign_mb) if hides_use else share


def share_of(need: Need, device: Device) -> Share:
    return Share(
        device_id=device.id,
        memory_mb=need.reserved_mb,
        load_percent=need.load_percent,
        slowdown=need.slowdown,
        is_exclusive=need.is_exclusive,
        spread_mb=need.spread_mb,
    )
