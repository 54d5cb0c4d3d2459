"""One vendor's probes in their fallback order: the first that answers is believed.

Rules:
- It never raises, and never takes longer than it was given: a probe that may hang in a driver has a thread of its own,
  and where another could still answer, the first may use up only half of the time.
- A probe that failed rests for a while that doubles with each failure; meanwhile its problem stands as it was, so that
  those who follow the samples can tell it once.
- A device that was there stays in sight: when its probe no longer lists it, or when no probe answers any more, it is
  shown as unhealthy and with nothing known of it. Parts of a card may come and go.
"""

import shutil
import time
from collections.abc import Sequence

from gpuyard.core.model import Device, Problem, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeTimeout
from gpuyard.ports import Clock, Probe
from gpuyard.probes.identity import without_number
from gpuyard.probes.worker import Worker

_MISSING_REST_S = 60.0
_LONGEST_REST_S = 60.0


class Chain:
    def __init__(self, vendor: Vendor, probes: Sequence[Probe], clock: Clock) -> None:
        self.vendor = vendor
        self._clock = clock
        self.rungs = [Rung(probe) for probe in probes]
        self._seen: dict[str, tuple[Device, str]] = {}

    def is_resting(self) -> bool:
        """Whether a read would only repeat what is known, at no cost."""
        now = self._clock.monotonic()
        return all(rung.is_resting(now) for rung in self.rungs)

    def read(self, timeout_s: float) -> Reading:
        deadline = time.monotonic() + timeout_s
        now = self._clock.monotonic()
        for place, rung in enumerate(self.rungs):
            if rung.is_resting(now):
                continue
            left = deadline - time.monotonic()
            has_other = any(other.is_present() and not other.is_resting(now) for other in self.rungs[place + 1 :])
            reading = rung.read(left / 2 if has_other else left, now)
            if reading is not None:
                return self._answer(rung, reading)
        return Reading(devices=self._all_unknown(), problems=self._problems(self.rungs))

    def overdue(self) -> Reading:
        """What to show where even `read` has not come back in time."""
        names = ", ".join(rung.name for rung in self.rungs)
        problem = Problem(
            source=names,
            kind="timeout",
            message="no answer within the deadline",
            hint="try a longer --deadline",
            vendor=self.vendor,
        )
        return Reading(devices=self._all_unknown(), problems=(problem,))

    def _answer(self, rung: "Rung", reading: Reading) -> Reading:
        above = self.rungs[: self.rungs.index(rung)]
        # A card that was split or joined anew goes by its old id with another number behind it, or with none.
        present = {without_number(device.id) for device in reading.devices}
        gone = [
            _unknown(device, f"{name} no longer lists it")
            for device, name in self._seen.values()
            if name == rung.name and without_number(device.id) not in present and device.parent is None
        ]
        self._seen = {device.id: (device, rung.name) for device in (*reading.devices, *gone)}
        return Reading(
            devices=(*reading.devices, *gone),
            problems=(*self._problems(above), *reading.problems),
        )

    def _all_unknown(self) -> tuple[Device, ...]:
        why = next((rung.problem for rung in self.rungs if rung.problem and rung.problem.kind != "missing"), None)
        fault = f"{why.source}: {why.message}" if why else f"no probe reads {self.vendor} devices now"
        return tuple(_unknown(device, fault) for device, _ in self._seen.values() if device.parent is None)

    def _problems(self, rungs: Sequence["Rung"]) -> tuple[Problem, ...]:
        problems = tuple(rung.problem for rung in rungs if rung.problem is not None)
        if len(problems) > 1 and all(problem.kind == "missing" for problem in problems):
            names = ", ".join(rung.name for rung in rungs)
            return (
                Problem(source=names, kind="missing", message="not installed, or no GPU for it", vendor=self.vendor),
            )
        return problems


class Rung:
    """A probe with its record: how often it failed, until when it rests, and the problem that stands."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._worker: Worker[Reading] = Worker(f"gpuyard-{probe.name}")
        self._failures = 0
        self._rests_until = 0.0
        self.problem: Problem | None = None

    @property
    def name(self) -> str:
        return self._probe.name

    def is_present(self) -> bool:
        """A guess that costs nothing: libraries are known only by trying them."""
        return self._probe.may_hang or shutil.which(self.name) is not None

    def is_resting(self, now: float) -> bool:
        return self.problem is not None and now < self._rests_until

    def read(self, timeout_s: float, now: float) -> Reading | None:
        try:
            reading = self._read_bounded(timeout_s)
        except ProbeError as error:
            self._fail(error, now)
            return None
        except Exception as error:  # noqa: BLE001 - one of the three outermost places: a probe's bug blinds only it
            bug = f"{type(error).__name__}: {error}"
            self._fail(ProbeCrashed(self.name, f"unexpected {bug[:200]}", hint="please report this"), now)
            return None
        self._failures, self.problem = 0, None
        return reading

    def _read_bounded(self, timeout_s: float) -> Reading:
        if not self._probe.may_hang:
            return self._probe.read(timeout_s)
        if not self._worker.start(lambda: self._probe.read(timeout_s)):
            raise ProbeTimeout(
                self.name, "an earlier call has not come back", hint="the driver may be stuck: see dmesg"
            )
        try:
            return self._worker.finish(timeout_s)
        except TimeoutError:
            raise ProbeTimeout(
                self.name,
                f"no answer within {timeout_s:.1f} s",
                hint="the driver may be waking up or stuck: try a longer --deadline, see dmesg",
            ) from None

    def _fail(self, error: ProbeError, now: float) -> None:
        self._failures += 1
        rest = _MISSING_REST_S if error.kind == "missing" else min(_LONGEST_REST_S, 2.0 ** (self._failures - 1))
        self._rests_until = now + rest
        if self.problem is None or self.problem.kind != error.kind:
            self.problem = Problem(
                source=error.source,
                kind=error.kind,
                message=error.message,
                hint=error.hint,
                vendor=self._probe.vendor,
            )


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
