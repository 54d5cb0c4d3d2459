"""The probes of one vendor in fallback order: the first that answers wins.

- Never raises, and never exceeds its timeout. A probe that may hang in a driver has its own thread: after a part of the
  time the next probe is started beside it, and the first still wins if it answers before the second.
- A failed probe backs off, doubling with each failure. Its problem stays unchanged meanwhile, so that it is reported
  once.
- A device stays listed after it was seen once: when its probe no longer lists it, or no probe answers, it is reported
  as unhealthy with all measurements unknown. Parts of a card may come and go.
- Readings are made printable: any user can give a process any name."""

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeTimeout
from gpuyard.model.machine_snapshot import Device, Problem, Reading, Vendor
from gpuyard.model.printable_text import printable
from gpuyard.probes.devices_and_processes import without_number
from gpuyard.probes.run_tool import Backoff, Deadline, as_problem
from gpuyard.system.clock import SystemClock
from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

if TYPE_CHECKING:
    from gpuyard.ports import Clock

_S = TypeVar("_S", bound=Struct)


def printable_reading(reading: Reading) -> Reading:
    """Return the reading with printable texts: names of processes and devices, faults, and messages of tools."""
    devices = []
    for device in reading.devices:
        processes = tuple(_printable(process, "name") for process in device.processes or ())
        if processes != (device.processes or ()):
            device = replace(device, processes=processes)  # noqa: PLW2901 - the same device
        devices.append(_printable(device, "id", "name", "parent", "pci_bus_id", "fault"))
    problems = tuple(_printable(problem, "message", "hint") for problem in reading.problems)
    return Reading(devices=tuple(devices), problems=problems)


def _printable(each: _S, *fields: str) -> _S:
    texts = {field: text for field in fields if (text := getattr(each, field)) and not text.isprintable()}
    return replace(each, **{field: printable(text) for field, text in texts.items()}) if texts else each


class Probe(Protocol):
    """Reads the devices of one vendor through one tool or library, such as NVML or `nvidia-smi`.

    One that can read single devices in less than a millisecond also has `read_memory(devices)`: the memory and the
    processes of these devices of an earlier reading, as far as they could be read; all other figures may be missing."""

    name: str  # of the tool or library, as problems and `gpuyard doctor` show it
    vendor: Vendor
    may_hang: bool  # `read` may exceed its timeout, like a call into a driver, and so needs its own thread

    def read(self, timeout_s: float) -> Reading:
        """Read all devices. Raises ProbeError, and no other exception, when that fails; so does `read_memory`."""


class ChainStep:
    """One probe of a chain, with its current problem, its backoff, and a pending answer."""

    def __init__(self, probe: Probe, clock: "Clock") -> None:
        self.name = probe.name
        self.may_hang = probe.may_hang
        self._probe, self._clock = probe, clock
        self._worker: WorkerThread[Reading] = WorkerThread(f"gpuyard-{probe.name}")
        self._backoff = Backoff()
        self._asked_at = 0.0
        self.problem: Problem | None = None
        self.is_late = False

    def is_resting(self) -> bool:
        return self._backoff.is_resting(self._clock.monotonic())

    def ask(self, timeout_s: float) -> Reading | None:
        """Return the reading; None if the probe failed, or if it `is_late`: then call `wait`."""
        if not self.may_hang:
            return self._note_result(lambda: self._probe.read(timeout_s))
        if not self._worker.start(lambda: self._probe.read(timeout_s)):
            hint = "the driver may hang: see dmesg"
            self._fail(ProbeTimeout(self.name, "an earlier call has not returned", hint=hint))
            return None
        self._asked_at, self.is_late = time.monotonic(), True
        return self._note_result(lambda: self._worker.finish(timeout_s))

    def wait(self, timeout_s: float) -> Reading | None:
        """Return the reading of a late probe, or None with `problem` set if it is still not there."""
        reading = self._note_result(lambda: self._worker.finish(timeout_s))
        if self.is_late:
            waited = time.monotonic() - self._asked_at
            hint = "the driver may be waking up or stuck: try a longer --deadline, see dmesg"
            self._fail(ProbeTimeout(self.name, f"no answer within {waited:.1f} s", hint=hint))
        return reading

    def read_memory(self, devices: Sequence[Device], timeout_s: float) -> Sequence[Device]:
        """Return the devices with new memory figures, as far as the probe reads them cheaply and answers in time. A
        failure is left to the next `ask`."""
        read = getattr(self._probe, "read_memory", None)
        if read is None or self.is_late or not self._worker.start(lambda: Reading(devices=tuple(read(devices)))):
            return ()
        try:
            return printable_reading(self._worker.finish(timeout_s)).devices
        except (ProbeError, NoAnswerYet):
            return ()

    def _note_result(self, answer: Callable[[], Reading]) -> Reading | None:
        try:
            reading = answer()
        except NoAnswerYet:
            pass
        except ProbeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - outermost place: a bug in one probe disables only that probe
            bug = f"{type(error).__name__}: {error}"
            self._fail(ProbeCrashed(self.name, f"unexpected {bug[:200]}", hint="please report this"))
        else:
            self._backoff.succeed()
            self.problem, self.is_late = None, False
            return printable_reading(reading)
        return None

    def _fail(self, error: ProbeError) -> None:
        """Record the failure. A failure of the same kind keeps the first problem, so that it is reported once."""
        self.is_late = False
        self._backoff.fail(error.kind, self._clock.monotonic())
        if self.problem is None or self.problem.kind != error.kind:
            self.problem = _printable(as_problem(error, self._probe.vendor), "message", "hint")


class FallbackChain:
    def __init__(self, vendor: Vendor, probes: Sequence[Probe], clock: "Clock") -> None:
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
                # An earlier probe that has answered meanwhile is preferred.
                late = self._late_reading(self._steps[:position], Deadline(0.0))
                return late or self._answer(step, reading)
        return self._late_reading(self._steps, deadline) or self.last_known()

    def read_memory(self, device_ids: Collection[str], timeout_s: float) -> Reading:
        """Read the memory and the processes of those devices where that costs little; all else is as last read."""
        wanted: dict[ChainStep, list[Device]] = {}
        for device, step in (self._seen[each] for each in device_ids if each in self._seen):
            if not step.is_resting() and device.healthy:
                wanted.setdefault(step, []).append(device)
        deadline, found = Deadline(timeout_s), []
        for step, devices in wanted.items():
            for now in step.read_memory(devices, deadline.left()):
                before, processes = self._seen[now.id][0], now.processes
                if processes is not None:
                    loads = {each.pid: each.utilization_percent for each in before.processes or ()}
                    processes = tuple(replace(each, utilization_percent=loads.get(each.pid)) for each in processes)
                figures = {f"memory_{name}_mb": getattr(now, f"memory_{name}_mb") for name in ("total", "used", "free")}
                device = replace(before, **figures, processes=processes)
                self._seen[now.id] = device, step
                found.append(device)
        return Reading(devices=tuple(found))

    def last_known(self) -> Reading:
        """Return the known devices as unhealthy, and the current problems, without a call."""
        return Reading(devices=self._all_unknown(), problems=self._problems(self._steps))

    def overdue(self) -> Reading:
        """Return the reading to use when `read` itself has not returned in time."""
        source, hint = ", ".join(step.name for step in self._steps), "try a longer --deadline"
        late = ProbeTimeout(source, "no answer within the deadline", hint=hint)
        return Reading(devices=self._all_unknown(), problems=(as_problem(late, self.vendor),))

    def _share(self, position: int) -> float:
        """Return the fraction of the time that a probe may use before the next one is started."""
        # A library is assumed to be installed: only a call would tell.
        following = [step for step in self._steps[position + 1 :] if step.may_hang or shutil.which(step.name)]
        others = [step for step in following if not step.is_resting()]
        if not others:
            return 1.0
        if self._steps[position].may_hang:
            return 0.4  # it continues on its thread, beside the next one
        return 0.85 if all(other.may_hang for other in others) else 0.6  # a library needs less time than a tool

    def _late_reading(self, steps: Sequence[ChainStep], deadline: Deadline) -> Reading | None:
        """Return the reading of the first late probe that answers by the deadline."""
        for step in steps:
            if step.is_late and (reading := step.wait(deadline.left())) is not None:
                return self._answer(step, reading)
        return None

    def _answer(self, step: ChainStep, reading: Reading) -> Reading:
        above = self._steps[: self._steps.index(step)]
        gone = tuple(self._gone(step, reading.devices))
        self._seen = {device.id: (device, step) for device in (*reading.devices, *gone)}
        return Reading(devices=(*reading.devices, *gone), problems=(*self._problems(above), *reading.problems))

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
    identity = {field: getattr(device, field) for field in ("id", "vendor", "index", "name", "pci_bus_id")}
    return Device(**identity, fault=fault)


class Checkup(Struct, frozen=True, kw_only=True):
    """The result of one probe. `devices` is None if it failed."""

    vendor: Vendor
    probe: str
    devices: tuple[Device, ...] | None
    problems: tuple[Problem, ...]
    seconds: float


def check_probes(probes: Mapping[Vendor, Sequence[Probe]], timeout_s: float) -> list[Checkup]:
    """Try every probe, including those behind a working one. The probes of one vendor share a driver: they are tried
    in sequence, and the vendors in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        checking = pool.map(lambda chain: [_check(probe, timeout_s) for probe in chain], probes.values())
        return [check for checked in checking for check in checked]


def _check(probe: Probe, timeout_s: float) -> Checkup:
    step = ChainStep(probe, SystemClock())
    started = time.monotonic()
    reading = step.ask(timeout_s)
    if step.is_late:
        reading = step.wait(0.0)
    problems = (*([step.problem] if step.problem else []), *(reading.problems if reading else ()))
    devices, seconds = reading.devices if reading else None, time.monotonic() - started
    return Checkup(vendor=probe.vendor, probe=probe.name, devices=devices, problems=problems, seconds=seconds)
