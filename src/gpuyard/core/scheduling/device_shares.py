"""The shares of devices that a need gets, and questions about a device and its leases."""

from msgspec.structs import replace

from gpuyard.core.lease import Need, Share
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.snapshot import Device


def claimed_share(need: Need, state: DeviceState) -> Share:
    share = share_of(need, state.device)
    hides_use = state.device.hides_processes and state.device.memory_used_mb is not None
    return replace(share, foreign_mb=state.foreign_mb) if hides_use else share


def share_of(need: Need, device: Device) -> Share:
    need = need.on(device.id)
    return Share(
        device_id=device.id,
        memory_mb=need.reserved_mb,
        load_percent=need.load_percent,
        is_exclusive=need.is_exclusive,
        spread_mb=need.spread_mb,
    )


def lease_ids(state: DeviceState) -> list[str]:
    """Return the leases on the device, each once, in the order of their shares: decisions never depend on hashes."""
    return list(dict.fromkeys(each.lease_id for each in state.promises if each.lease_id is not None))


def has_free_part(state: DeviceState) -> bool:
    """Return whether the device is neither held exclusively nor full."""
    return not state.is_exclusive and (not state.promises or state.free_mb is None or state.free_mb > 0.0)
