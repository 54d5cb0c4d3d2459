"""Tries every probe of the machine, also those that a working one would have spared."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from gpuyard.core.snapshot import Device, Problem, Vendor
from gpuyard.ports import Probe
from gpuyard.probes.chain_step import ChainStep
from gpuyard.system.clock import SystemClock


class Checkup(Struct, frozen=True, kw_only=True):
    """What one probe did; `devices` is `None` where it did not answer."""

    vendor: Vendor
    probe: str
    devices: tuple[Device, ...] | None
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def works(self) -> bool:
        return self.devices is not None


def check_probes(probes: Mapping[Vendor, Sequence[Probe]], timeout_s: float) -> list[Checkup]:
    """Vendors at once, one vendor's probes after each other, since they use the same driver."""
    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        checking = [pool.submit(_check_each, rungs, timeout_s) for rungs in probes.values()]
        return [check for checked in checking for check in checked.result()]


def _check_each(probes: Sequence[Probe], timeout_s: float) -> list[Checkup]:
    return [_check(probe, timeout_s) for probe in probes]


def _check(probe: Probe, timeout_s: float) -> Checkup:
    rung = ChainStep(probe, SystemClock())
    started = time.monotonic()
    reading = rung.read(timeout_s)
    return Checkup(
        vendor=probe.vendor,
        probe=probe.name,
        devices=None if reading is None else reading.devices,
        problems=tuple(_problems(rung, reading.problems if reading else ())),
        seconds=time.monotonic() - started,
    )


def _problems(rung: ChainStep, noted: Sequence[Problem]) -> Iterator[Problem]:
    if rung.problem is not None:
        yield rung.problem
    yield from noted
