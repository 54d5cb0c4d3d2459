"""One vendor's probes in their fallback order: the first that answers is believed.

Rules:
- It never raises, and never takes longer than it was given. A probe that may hang in a driver has a thread of its own:
  after a part of the time the next one is asked beside it, and the first is still believed if it answers by then.
- A probe that failed rests for a while that doubles with each failure; meanwhile its problem stands as it was, so that
  those who follow the samples can tell it once.
- A device that was there stays in sight: when its probe no longer lists it, or when no probe answers any more, it is
  shown as unhealthy and with nothing known of it. Parts of a card may come and go.
"""

from collections.abc import Iterator, Sequence

from gpuyard.core.snapshot import Device, Problem, Reading, Vendor
from gpuyard.ports import Clock, Probe
from gpuyard.probes.chain_step import ChainStep
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.device_ids import without_number

# How much of the time a probe may use alone while others could still answer: one on a thread of its own loses nothing
# by an early start of the next, and a library needs less time left for it than a tool.
_ALONE_ON_A_THREAD = 0.4
_ALONE_BEFORE_A_TOOL = 0.6
_ALONE_BEFORE_A_LIBRARY = 0.85


class FallbackChain:
    def __init__(self, vendor: Vendor, probes: Sequence[Probe], clock: Clock) -> None:
        self.vendor = vendor
        self._rungs = [ChainStep(probe, clock) for probe in probes]
        self._seen: dict[str, tuple[Device, ChainStep]] = {}

    def is_resting(self) -> bool:
        """Whether there is nothing to ask, and `standing` is all there is to say."""
        return all(rung.is_resting() for rung in self._rungs)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        for place, rung in enumerate(self._rungs):
            if rung.is_resting() or deadline.is_over():
                continue
            reading = rung.ask(deadline.left() * self._share(place))
            if reading is not None:
                return self._believe(rung, reading)
        for rung in self._rungs:
            reading = rung.wait(deadline.left()) if rung.is_late else None
            if reading is not None:
                return self._answer(rung, reading)
        return self.standing()

    def standing(self) -> Reading:
        """What is known without asking anybody."""
        return Reading(devices=self._all_unknown(), problems=self._problems(self._rungs))

    def overdue(self) -> Reading:
        """What to show where even `read` has not come back in time."""
        problem = Problem(
            source=", ".join(rung.name for rung in self._rungs),
            kind="timeout",
            message="no answer within the deadline",
            hint="try a longer --deadline",
            vendor=self.vendor,
        )
        return Reading(devices=self._all_unknown(), problems=(problem,))

    def _share(self, place: int) -> float:
        others = [other for other in self._rungs[place + 1 :] if other.is_present() and not other.is_resting()]
        if not others:
            return 1.0
        if self._rungs[place].may_hang:
            return _ALONE_ON_A_THREAD
        return _ALONE_BEFORE_A_LIBRARY if all(other.may_hang for other in others) else _ALONE_BEFORE_A_TOOL

    def _believe(self, rung: ChainStep, reading: Reading) -> Reading:
        """An earlier probe that has answered meanwhile goes before; one that still has not is out of time."""
        for earlier in self._rungs[: self._rungs.index(rung)]:
            late = earlier.wait(0.0) if earlier.is_late else None
            if late is not None:
                return self._answer(earlier, late)
        return self._answer(rung, reading)

    def _answer(self, rung: ChainStep, reading: Reading) -> Reading:
        above = self._rungs[: self._rungs.index(rung)]
        gone = tuple(self._gone(rung, reading.devices))
        self._seen = {device.id: (device, rung) for device in (*reading.devices, *gone)}
        return Reading(
            devices=(*reading.devices, *gone),
            problems=(*self._problems(above), *reading.problems),
        )

    def _gone(self, rung: ChainStep, devices: Sequence[Device]) -> Iterator[Device]:
        # A card that was split or joined anew goes by its old id with another number behind it, or with none.
        ids = {without_number(device.id) for device in devices}
        places = {device.pci_bus_id for device in devices}
        for device, seen_by in self._seen.values():
            if device.parent is not None or without_number(device.id) in ids or device.pci_bus_id in places - {None}:
                continue
            # Another probe may know the same device by another name, and only its place on the bus tells.
            if seen_by is rung or (device.pci_bus_id is not None and None not in places):
                yield _unknown(device, f"{rung.name} no longer lists it")

    def _all_unknown(self) -> tuple[Device, ...]:
        why = next((rung.problem for rung in self._rungs if rung.problem and rung.problem.kind != "missing"), None)
        fault = f"{why.source}: {why.message}" if why else f"no probe reads {self.vendor} devices now"
        return tuple(_unknown(device, fault) for device, _ in self._seen.values() if device.parent is None)

    def _problems(self, rungs: Sequence[ChainStep]) -> tuple[Problem, ...]:
        problems = tuple(rung.problem for rung in rungs if rung.problem is not None)
        if len(problems) > 1 and all(problem.kind == "missing" for problem in problems):
            tried = ", ".join(rung.name for rung in rungs)
            return (Problem(source=tried, kind="missing", message="not installed, or no such GPU", vendor=self.vendor),)
        return problems


def _unknown(device: Device, fault: str) -> Device:
    """All that is lasting about a device, and nothing that was measured."""
    return Device(
        id=device.id,
        vendor=device.vendor,
        index=device.index,
        name=device.name,
        pci_bus_id=device.pci_bus_id,
        fault=fault,
    )
