"""Count running jobs: per tag, per array, per tag on a device, and without devices."""

from collections.abc import Iterable, Sequence

from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.scheduling.wait_remedies import remedy_for


class RunningCounts:
    """The number of running jobs, including the starts of the current plan."""

    def __init__(self, running: Sequence[RunningJob]) -> None:
        self.by_tag: dict[str, int] = {}
        self.by_group: dict[int | None, int] = {}
        self.by_tag_and_device: dict[str, dict[str, int]] = {}
        self.without_devices = 0
        for job in running:
            self.add(job.tag, job.group, job.devices, takes_slot=job.takes_slot)
            self.add_to_devices(job.tag, job.device_ids)

    def add(self, tag: str, group: int | None, devices: int, *, takes_slot: bool) -> None:
        self.by_tag[tag] = self.by_tag.get(tag, 0) + 1
        self.by_group[group] = self.by_group.get(group, 0) + 1
        self.without_devices += not devices and takes_slot

    def add_to_devices(self, tag: str, device_ids: Iterable[str]) -> None:
        counts = self.by_tag_and_device.setdefault(tag, {})
        for device_id in device_ids:
            counts[device_id] = counts.get(device_id, 0) + 1


def limit_reached(kind: ReasonKind, what: str, most: int) -> Reason:
    """Return the reason that `most` of `what` already run; `what` begins with a plural, such as "jobs of its array"."""
    noun, _, rest = what.partition(" ")
    counted = f"{most} {noun.removesuffix('s') if most == 1 else noun} {rest}"
    text = f"limit reached: at most {counted} at a time" if most else f"{what} may not run: their limit is 0"
    return Reason(kind=kind, text=text, had=float(most), needed=float(most), remedy=remedy_for(kind))
