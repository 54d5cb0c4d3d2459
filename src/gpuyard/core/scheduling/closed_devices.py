"""Closed devices: nothing new starts on them, because a user drained them or the configuration bans them.

Both apply at every decision, also to work that waited before. Work that already runs there goes on.
"""

from collections.abc import Collection, Sequence

from gpuyard.core.lease import Drain
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import format_time


def closed_devices(snapshot: Snapshot, drains: Sequence[Drain], banned: Collection[str]) -> dict[str, Reason]:
    """Return why nothing new starts on each closed device, by its id. What closes a card closes its parts."""
    if not drains and not banned:
        return {}
    found: dict[str, Reason] = {}
    for device in snapshot.devices:
        drain = drain_of(device, drains)
        if device.id in banned or device.parent in banned:
            found[device.id] = _reason(ReasonKind.BANNED, "banned in the configuration", device)
        elif drain is not None:
            found[device.id] = _reason(ReasonKind.DRAINED, describe_drain(drain), device)
    return found


def _reason(kind: ReasonKind, text: str, device: Device) -> Reason:
    return Reason(kind, text, device.id, remedy=REMEDIES[kind], is_leased=True)


def drain_of(device: Device, drains: Sequence[Drain]) -> Drain | None:
    """Return the drain that holds for the device, the oldest if there are several."""
    found = (drain for drain in drains if drain.device_id in (device.id, device.parent))
    return min(found, key=lambda drain: drain.since, default=None)


def describe_drain(drain: Drain) -> str:
    reason = f": {drain.reason}" if drain.reason else ""
    return f"drained by {drain.user} since {format_time(iso_time(drain.since))}{reason}"
