"""How many run already: of a tag, of an array, of a tag on a device, without devices."""

from collections.abc import Iterable, Sequence

from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.scheduling.wait_remedies import remedy_for


class Counts:
    """How many run already, the starts of this plan included."""

    def __init__(self, running: Sequence[RunningJob]) -> None:
        self.tags: dict[str, int] = {}
        self.groups: dict[int | None, int] = {}
        self.on: dict[str, dict[str, int]] = {}
        self.without_devices = 0
        for run in running:
            self.add(run.tag, run.group, run.devices, takes_slot=run.takes_slot)
            self.place(run.tag, run.on)

    def add(self, tag: str, group: int | None, devices: int, *, takes_slot: bool) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.groups[group] = self.groups.get(group, 0) + 1
        self.without_devices += not devices and takes_slot

    def place(self, tag: str, devices: Iterable[str]) -> None:
        on = self.on.setdefault(tag, {})
        for device_id in devices:
            on[device_id] = on.get(device_id, 0) + 1


def limit_reached(kind: ReasonKind, what: str, most: int) -> Reason:
    if most == 1:
        text = f"one of the {what} may run at a time, and one does"
    else:
        text = f"{most} {what} may run at once, and as many do" if most else f"{what} may not run now: their limit is 0"
    return Reason(kind=kind, text=text, had=float(most), needed=float(most), remedy=remedy_for(kind))
