"""`gpuyard sim-job`: a real process that uses a simulated device."""

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from gpuyard.core.units import format_size, parse_size
from gpuyard.ui.cli.output import seconds

if TYPE_CHECKING:
    from gpuyard.probes.simulated import Usage

_STEP_S = 0.1


@click.command("sim-job")
@click.option(
    "--vram", "vram_mb", type=parse_size, default="1G", metavar="SIZE", help="Memory to take, such as 8G. [1G]"
)
@click.option("--load", "load_percent", type=click.FloatRange(0, 100), default=0.0, metavar="PERCENT",
              help="How busy to keep the device.")  # fmt: skip
@seconds("seconds", "5s", 0.0, "How long to run in all.")
@seconds("ramp", "0s", 0.0, "Take the memory step by step over this time.")
@click.option("--device", "device", metavar="INDEX|ID",
              help="Which device. [the first that CUDA_VISIBLE_DEVICES shows]")  # fmt: skip
def command(vram_mb: float, load_percent: float, seconds_s: float, ramp_s: float, device: str | None) -> int:
    """Use a simulated GPU for a while, as a job would.

    It needs GPUYARD_SIMULATE, such as 2x24GB. When the device is full it prints an out-of-memory error as CUDA does,
    and exits with 1. However it ends, what it took is free again at once.
    """
    from gpuyard.errors import SimulatedOutOfMemory, UserError
    from gpuyard.probes.simulated import SimulatedDevices, Usage, visible_device_ids

    environment = dict(os.environ) if device is None else {"CUDA_VISIBLE_DEVICES": device}
    devices = SimulatedDevices()
    visible = visible_device_ids(devices, environment)
    if not visible:
        known = ", ".join(f"{d.index} ({d.id})" for d in devices.devices)
        raise UserError("no such simulated device is visible", hint=f"there are: {known}")
    try:
        with Usage(devices) as usage:
            usage.set_load(visible[0], load_percent)
            _run(usage, visible[0], vram_mb, seconds_s, ramp_s)
    except SimulatedOutOfMemory as error:
        click.echo(f"torch.OutOfMemoryError: {error}", err=True)
        return 1
    return 0


def _run(usage: "Usage", device_id: str, vram_mb: float, seconds_s: float, ramp_s: float) -> None:
    started = time.monotonic()
    steps = max(1, round(ramp_s / _STEP_S))
    for step in range(1, steps + 1):
        usage.allocate(device_id, vram_mb / steps)
        _sleep_until(started + ramp_s * step / steps)
    click.echo(f"{device_id}: holding {format_size(vram_mb)}")
    sys.stdout.flush()
    _sleep_until(started + seconds_s)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
