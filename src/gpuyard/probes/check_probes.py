"""Try every probe of the machine, including those behind a working one in the fallback order."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from gpuyard.core.snapshot import Device, Problem, Vendor
from gpuyard.ports import Probe
from gpuyard.probes.fallback_chain import ChainStep
from gpuyard.system.clock import SystemClock


class Checkup(Struct, frozen=True, kw_only=True):
    """The result of one probe. `devices` is None if it failed."""

    vendor: Vendor
    probe: str
    devices: tuple[Device, ...] | None
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def works(self) -> bool:
        return self.devices is not None


def check_probes(probes: Mapping[Vendor, Sequence[Probe]], timeout_s: float) -> list[Checkup]:
    """Check all vendors in parallel, and the probes of one vendor in sequence because they share a driver."""
    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        checking = pool.map(lambda chain: [_check(probe, timeout_s) for probe in chain], probes.values())
        return [check for checked in checking for check in checked]


def _check(probe: Probe, timeout_s: float) -> Checkup:
    step = ChainStep(probe, SystemClock())
    started = time.monotonic()
    reading = step.read(timeout_s)
    noted = reading.problems if reading else ()
    return Checkup(
        vendor=probe.vendor,
        probe=probe.name,
        devices=None if reading is None else reading.devices,
        problems=noted if step.problem is None else (step.problem, *noted),
        seconds=time.monotonic() - started,
    )
