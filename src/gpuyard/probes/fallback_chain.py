"""The probes of one vendor in fallback order: the first that answers wins.

Rules:
- Never raises, and never exceeds its timeout. A probe that may hang in a driver has its own thread: after a part of the
  time the next probe is started beside it, and the first still wins if it answers before the second.
- A failed probe backs off, doubling with each failure. Its problem stays unchanged meanwhile, so that it is reported
  once.
- A device stays listed after it was seen once: when its probe no longer lists it, or no probe answers, it is reported
  as unhealthy with all measurements unknown. Parts of a card may come and go.
"""

from collections.abc import Iterator, Sequence

from gpuyard.core.snapshot import Device, Problem, Reading, Vendor
from gpuyard.ports import Clock, Probe
from gpuyard.probes.chain_step import ChainStep
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.device_ids import without_number

# The fraction of the timeout that a probe may use before the next one is started. A probe on its own thread continues
# beside the next one, and a library needs less remaining time than a tool.
_ALONE_ON_A_THREAD = 0.4
_ALONE_BEFORE_A_TOOL = 0.6
_ALONE_BEFORE_A_LIBRARY = 0.85


class FallbackChain:
    def __init__(self, vendor: Vendor, probes: Sequence[Probe], clock: Clock) -> None:
        self.vendor = vendor
        self._steps = [ChainStep(probe, clock) for probe in probes]
        self._seen: dict[str, tuple[Device, ChainStep]] = {}

    def is_resting(self) -> bool:
        """Return whether all probes back off, so that `last_known` is the only answer."""
        return all(step.is_resting() for step in self._steps)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        for position, step in enumerate(self._steps):
            if step.is_resting() or deadline.is_over():
                continue
            reading = step.ask(deadline.left() * self._share(position))
            if reading is not None:
                return self._prefer_earlier(step, reading)
        for step in self._steps:
            reading = step.wait(deadline.left()) if step.is_late else None
            if reading is not None:
                return self._answer(step, reading)
        return self.last_known()

    def last_known(self) -> Reading:
        """Return the known devices as unhealthy, and the current problems, without a call."""
        return Reading(devices=self._all_unknown(), problems=self._problems(self._steps))

    def overdue(self) -> Reading:
        """Return the reading to use when `read` itself has not returned in time."""
        problem = Problem(
            source=", ".join(step.name for step in self._steps),
            kind="timeout",
            message="no answer within the deadline",
            hint="try a longer --deadline",
            vendor=self.vendor,
        )
        return Reading(devices=self._all_unknown(), problems=(problem,))

    def _share(self, position: int) -> float:
        others = [other for other in self._steps[position + 1 :] if other.is_present() and not other.is_resting()]
        if not others:
            return 1.0
        if self._steps[position].may_hang:
            return _ALONE_ON_A_THREAD
        return _ALONE_BEFORE_A_LIBRARY if all(other.may_hang for other in others) else _ALONE_BEFORE_A_TOOL

    def _prefer_earlier(self, step: ChainStep, reading: Reading) -> Reading:
        """Return this reading, or that of an earlier probe which answered meanwhile."""
        for earlier in self._steps[: self._steps.index(step)]:
            late = earlier.wait(0.0) if earlier.is_late else None
            if late is not None:
                return self._answer(earlier, late)
        return self._answer(step, reading)

    def _answer(self, step: ChainStep, reading: Reading) -> Reading:
        above = self._steps[: self._steps.index(step)]
        gone = tuple(self._gone(step, reading.devices))
        self._seen = {device.id: (device, step) for device in (*reading.devices, *gone)}
        return Reading(
            devices=(*reading.devices, *gone),
            problems=(*self._problems(above), *reading.problems),
        )

    def _gone(self, step: ChainStep, devices: Sequence[Device]) -> Iterator[Device]:
        # A card that was split again or rejoined keeps its id with another number appended, or none.
        ids = {without_number(device.id) for device in devices}
        bus_ids = {device.pci_bus_id for device in devices}
        for device, seen_by in self._seen.values():
            if device.parent is not None or without_number(device.id) in ids or device.pci_bus_id in bus_ids - {None}:
                continue
            # Another probe may use another id for the same device; only the PCI bus id identifies it then.
            if seen_by is step or (device.pci_bus_id is not None and None not in bus_ids):
                yield _unknown(device, f"{step.name} no longer lists it")

    def _all_unknown(self) -> tuple[Device, ...]:
        why = next((step.problem for step in self._steps if step.problem and step.problem.kind != "missing"), None)
        fault = f"{why.source}: {why.message}" if why else f"no probe reads {self.vendor} devices now"
        return tuple(_unknown(device, fault) for device, _ in self._seen.values() if device.parent is None)

    def _problems(self, steps: Sequence[ChainStep]) -> tuple[Problem, ...]:
        problems = tuple(step.problem for step in steps if step.problem is not None)
        if len(problems) > 1 and all(problem.kind == "missing" for problem in problems):
            tried = ", ".join(step.name for step in steps)
            return (Problem(source=tried, kind="missing", message="not installed, or no such GPU", vendor=self.vendor),)
        return problems


def _unknown(device: Device, fault: str) -> Device:
    """Return the device with its identity and without measurements."""
    return Device(
        id=device.id,
        vendor=device.vendor,
        index=device.index,
        name=device.name,
        pci_bus_id=device.pci_bus_id,
        fault=fault,
    )
