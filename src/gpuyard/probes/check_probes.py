"""Try every probe of the machine, including those behind a working one in the fallback order."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from gpuyard.core.snapshot import Device, Problem, Vendor
from gpuyard.ports import Probe
from gpuyard.probes.chain_step import ChainStep
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
        checking = [pool.submit(_check_each, chain, timeout_s) for chain in probes.values()]
        return [check for checked in checking for check in checked.result()]


def _check_each(probes: Sequence[Probe], timeout_s: float) -> list[Checkup]:
    return [_check(probe, timeout_s) for probe in probes]


def _check(probe: Probe, timeout_s: float) -> Checkup:
    step = ChainStep(probe, SystemClock())
    started = time.monotonic()
    reading = step.read(timeout_s)
    return Checkup(
        vendor=probe.vendor,
        probe=probe.name,
        devices=None if reading is None else reading.devices,
        problems=tuple(_problems(step, reading.problems if reading else ())),
        seconds=time.monotonic() - started,
    )


def _problems(step: ChainStep, noted: Sequence[Problem]) -> Iterator[Problem]:
    if step.problem is not None:
        yield step.problem
    yield from noted
