"""Tries every probe of the machine, also those that a working one would have spared."""

import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.model import Device, Problem, Vendor
from gpuyard.ports import Probe
from gpuyard.probes.chain import Rung
from gpuyard.probes.worker import Worker


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
    workers = {vendor: Worker[list[Checkup]](f"gpuyard-check-{vendor}") for vendor in probes}
    for vendor, rungs in probes.items():
        workers[vendor].start(lambda rungs=rungs: [_check(probe, timeout_s) for probe in rungs])  # type: ignore[misc]
    longest = timeout_s + 1.0
    return [check for vendor in probes for check in workers[vendor].finish(longest * len(probes[vendor]))]


def _check(probe: Probe, timeout_s: float) -> Checkup:
    rung = Rung(probe)
    started = time.monotonic()
    reading = rung.read(timeout_s, started)
    return Checkup(
        vendor=probe.vendor,
        probe=probe.name,
        devices=None if reading is None else reading.devices,
        problems=tuple(_problems(rung, reading.problems if reading else ())),
        seconds=time.monotonic() - started,
    )


def _problems(rung: Rung, noted: Sequence[Problem]) -> Iterator[Problem]:
    if rung.problem is not None:
        yield rung.problem
    yield from noted
