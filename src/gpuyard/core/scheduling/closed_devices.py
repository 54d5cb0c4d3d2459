"""Closed devices: nothing new starts on them: a user drained them, the configuration bans them, or they are faulty.

All of it applies at every decision, also to work that waited before. Work that already runs there goes on.
"""

from collections.abc import Collection, Sequence

from gpuyard.core.health_figures import HealthMark, IssueKind
from gpuyard.core.lease import Drain
from gpuyard.core.scheduling.device_health import HealthIssue, describe_issue, device_issues, first_faults
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import format_time


def closed_devices(
    snapshot: Snapshot, drains: Sequence[Drain], banned: Collection[str], marks: Sequence[HealthMark] = ()
) -> dict[str, Reason]:
    """Return why nothing new starts on each closed device, by its id. What closes a card closes its parts."""
    faults = first_faults(device_issues(snapshot, marks))
    # A lost device is no candidate anyway (`rules.UsableDevice`), and keeps the driver's own words as its reason.
    found = {each: _faulty(each, fault) for each, fault in faults.items() if fault.kind is not IssueKind.LOST}
    if not drains and not banned:
        return found
    for device in snapshot.devices:
        drain = drain_of(device, drains)
        if device.id in banned or device.parent in banned:
            found[device.id] = _reason("banned", "banned in the configuration", device)
        elif drain is not None:
            found[device.id] = _reason("drained", describe_drain(drain), device)
    return found


def _faulty(device_id: str, fault: HealthIssue) -> Reason:
    # No drain: a new measurement may show that the fault is over.
    return Reason(ReasonKind.UNHEALTHY, describe_issue(fault), device_id, remedy=fault.remedy)


def _reason(why: str, text: str, device: Device) -> Reason:
    return Reason(ReasonKind.CLOSED, text, device.id, remedy=REMEDIES[why], is_leased=True)


def drain_of(device: Device, drains: Sequence[Drain]) -> Drain | None:
    """Return the drain that holds for the device, the oldest if there are several."""
    found = (drain for drain in drains if drain.device_id in (device.id, device.parent))
    return min(found, key=lambda drain: drain.since, default=None)


def describe_drain(drain: Drain) -> str:
    reason = f": {drain.reason}" if drain.reason else ""
    return f"drained by {drain.user} since {format_time(iso_time(drain.since))}{reason}"


def drain_notice(drain: Drain, label: str) -> str:
    return f"GPU {label} is {describe_drain(drain)}; `gpuyard devices undrain {label}` lets work start there"
