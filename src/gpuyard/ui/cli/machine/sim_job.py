"""`gpuyard sim-job`: a real process that uses a simulated GPU."""

import os
import sys
import time
import zlib

import click

from gpuyard.core.device_names import find_devices
from gpuyard.core.snapshot import Host, Snapshot
from gpuyard.core.units import format_size, parse_duration, parse_size
from gpuyard.errors import SimulatedOutOfMemory, UserError
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids
from gpuyard.ui.cli.rich_output import seconds

_STEP_S = 0.1
_UNIT_S = 0.01


def _parse_growth(text: str) -> tuple[float, float]:
    size, _, moment = text.partition("@")
    if not size or not moment:
        raise UserError(f"'{text}' is not a size and a time", hint="write it as 2G@3s")
    return parse_duration(moment), parse_size(size)


@click.command("sim-job")
@click.option(
    "--vram", "vram_mb", type=parse_size, default="1G", metavar="SIZE", help="Memory to allocate, such as 8G. [1G]"
)
@click.option("--load", "load_percent", type=click.FloatRange(0, 100), default=0.0, metavar="PERCENT",
              help="Utilisation of the device.")  # fmt: skip
@seconds("seconds", "5s", 0.0, "Total run time.")
@seconds("ramp", "0s", 0.0, "Allocate the memory step by step over this time.")
@click.option("--then", "growth", type=_parse_growth, multiple=True, metavar="SIZE@TIME",
              help="Allocate SIZE more TIME after the start, such as 2G@3s. May be repeated.")  # fmt: skip
@click.option("--work", "units", type=click.IntRange(min=1), metavar="N",
              help="Do N units of work of 10 ms instead of --seconds, and print their checksum.")  # fmt: skip
@click.option("--device", "device", metavar="INDEX|ID",
              help="Which device. [the first that CUDA_VISIBLE_DEVICES or its vendor's variable shows]")  # fmt: skip
def command(  # noqa: PLR0913 - an option each
    *, vram_mb: float, load_percent: float, seconds_s: float, ramp_s: float, growth: tuple[tuple[float, float], ...],
    units: int | None, device: str | None,
) -> int:  # fmt: skip
    """Use a simulated GPU for a while, as a job would.

    Needs GPUYARD_SIMULATE, such as 2x24GB. When the device is full it prints an out-of-memory error as CUDA does, and
    exits with 1. Its memory is free again as soon as the process ends, also if it is killed.
    """
    devices = SimulatedDevices()
    known = Snapshot(taken_at=None, host=Host(), devices=devices.devices)
    visible = visible_device_ids(devices, os.environ) if device is None else find_devices([device], known)
    if not visible:
        names = ", ".join(f"{known.labels[each.id]} ({each.id})" for each in devices.devices)
        raise UserError("no simulated device is visible", hint=f"name one with --device: {names}")
    try:
        with SimulatedUse(devices) as usage:
            usage.set_load(visible[0], load_percent)
            job = _Job(usage, visible[0], growth)
            job.take(vram_mb, ramp_s)
            if units is None:
                job.wait(seconds_s)
            else:
                job.work(units)
    except SimulatedOutOfMemory as error:
        click.echo(f"torch.OutOfMemoryError: {error}", err=True)
        return 1
    return 0


class _Job:
    def __init__(self, usage: SimulatedUse, device_id: str, growth: tuple[tuple[float, float], ...]) -> None:
        self._usage = usage
        self._device_id = device_id
        self._growth = sorted(growth)
        self._started = time.monotonic()

    def take(self, vram_mb: float, ramp_s: float) -> None:
        steps = max(1, round(ramp_s / _STEP_S))
        for step in range(1, steps + 1):
            self._usage.allocate(self._device_id, vram_mb / steps)
            self._sleep_until(ramp_s * step / steps)
        click.echo(f"{self._device_id}: holding {format_size(vram_mb)}")
        sys.stdout.flush()

    def wait(self, seconds_s: float) -> None:
        while self._growth and self._growth[0][0] < seconds_s:
            self._sleep_until(self._growth[0][0])
            self._grow()
        self._sleep_until(seconds_s)

    def work(self, units: int) -> None:
        """Work through all units; the checksum proves that each ran once and in order, also across a suspension."""
        checksum = 0
        for unit in range(units):
            self._grow()
            self._usage.work()
            time.sleep(_UNIT_S)
            checksum = zlib.crc32(b"%d" % unit, checksum)
        click.echo(f"{units} units, checksum {checksum:08x}")

    def _grow(self) -> None:
        """Allocate the memory of every --then whose time has come."""
        while self._growth and self._started + self._growth[0][0] <= time.monotonic():
            self._usage.allocate(self._device_id, self._growth.pop(0)[1])

    def _sleep_until(self, seconds_s: float) -> None:
        time.sleep(max(0.0, self._started + seconds_s - time.monotonic()))
