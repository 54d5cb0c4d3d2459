"""What a submission says if all GPUs that suit the job are drained or faulty: it waits until a user acts."""

from collections.abc import Mapping

from gpuyard.core.job.job import JobSpec
from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.snapshot import Device, Snapshot

_MOST_NAMED = 4


def closed_notes(spec: JobSpec, snapshot: Snapshot, closed: Mapping[str, Reason]) -> list[str]:
    """Return which GPUs take no new work, and what to do, if the others are too few for the job. `closed` has the
    reason of each drained or faulty GPU."""
    if not spec.need.devices or spec.engine:
        return []
    suitable = [device for device in snapshot.unsplit_devices() if check_suitable(spec.need, device) is None]
    shut = {device.id: reason for device in suitable if (reason := _reason(device, closed)) is not None}
    if not shut or len(suitable) - len(shut) >= spec.need.devices:
        return []
    named = [
        f"GPU {label} is {reason.text} ({_remedy(reason, label)})"
        for label, reason in ((snapshot.labels.get(each, each), reason) for each, reason in shut.items())
    ]
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return [f"it waits: too few GPUs that suit it take new work: {'; '.join(named[:_MOST_NAMED])}{more}"]


def _reason(device: Device, closed: Mapping[str, Reason]) -> Reason | None:
    if device.healthy:
        return closed.get(device.id)
    text = f"unhealthy: {device.fault}"
    return Reason(ReasonKind.UNHEALTHY, text, device.id, remedy=REMEDIES[ReasonKind.UNHEALTHY])


def _remedy(reason: Reason, label: str) -> str:
    return f"`gpuyard devices undrain {label}`" if reason.kind is ReasonKind.DRAINED else reason.remedy
