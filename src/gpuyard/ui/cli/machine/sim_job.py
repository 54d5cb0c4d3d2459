"""`gpuyard sim-job`: a real process that uses a simulated GPU."""

import os
import sys
import time
import zlib
from collections.abc import Sequence

from gpuyard.errors import SimulatedOutOfMemory, UserError
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.model.option import Option
from gpuyard.model.units import format_size, parse_duration, parse_size
from gpuyard.policy.device_names import find_devices
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids
from gpuyard.ui.cli.command_grammar import Typed, Verb
from gpuyard.ui.cli.terminal import note, say

VERB = Verb(
    """Use a simulated GPU for a while, as a job would.

    Needs GPUYARD_SIMULATE, such as 2x24GB. When the device is full it prints an out-of-memory error as CUDA does, and
    exits with 1. Its memory is free again as soon as the process ends, also if it is killed.
    """,
    (
        Option("vram", "size", "SIZE", "Memory to allocate, such as 8G.", default="1G", least=0),
        Option("load", "number", "PERCENT", "Utilisation of the device.", default="0", least=0, most=100),
        Option("seconds", "time", "TIME", "Total run time.", default="5s", least=0),
        Option("ramp", "time", "TIME", "Allocate the memory step by step over this time.", default="0s", least=0),
        Option("then", "texts", "SIZE@TIME",
               "Allocate SIZE more TIME after the start, such as 2G@3s. May be repeated."),
        Option("work", "whole", "N",
               "Do N units of work of 10 ms instead of --seconds, and print their checksum.", least=1),
        Option("device", "text", "INDEX|ID", "Which device.",
               note="the first that CUDA_VISIBLE_DEVICES or its vendor's variable shows"),
    ),
)  # fmt: skip


def run(typed: Typed) -> int:
    values = typed.values()
    device, devices = values["device"], SimulatedDevices()
    growth = []
    for text in values["then"]:
        size, _, moment = text.partition("@")
        if not size or not moment:
            raise UserError(f"'{text}' is not a size and a time", hint="write it as 2G@3s")
        growth.append((parse_duration(moment), parse_size(size)))
    known = Snapshot(taken_at=None, host=Host(), devices=devices.devices)
    visible = visible_device_ids(devices, os.environ) if device is None else find_devices([device], known)
    if not visible:
        names = ", ".join(f"{known.labels[each.id]} ({each.id})" for each in devices.devices)
        raise UserError("no simulated device is visible", hint=f"name one with --device: {names}")
    try:
        with SimulatedUse(devices) as usage:
            usage.set_load(visible[0], values["load"])
            job = _Job(usage, visible[0], growth)
            job.take(values["vram"], values["ramp"])
            if values["work"] is None:
                job.wait(values["seconds"])
            else:
                job.work(values["work"])
    except SimulatedOutOfMemory as error:
        note(f"torch.OutOfMemoryError: {error}")
        return 1
    return 0


class _Job:
    def __init__(self, usage: SimulatedUse, device_id: str, growth: Sequence[tuple[float, float]]) -> None:
        self._usage = usage
        self._device_id = device_id
        self._growth = sorted(growth)
        self._started = time.monotonic()

    def take(self, vram_mb: float, ramp_s: float) -> None:
        steps = max(1, round(ramp_s / 0.1))
        for step in range(1, steps + 1):
            self._usage.allocate(self._device_id, vram_mb / steps)
            self._sleep_until(ramp_s * step / steps)
        say(f"{self._device_id}: holding {format_size(vram_mb)}")
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
            time.sleep(0.01)
            checksum = zlib.crc32(b"%d" % unit, checksum)
        say(f"{units} units, checksum {checksum:08x}")

    def _grow(self) -> None:
        while self._growth and self._started + self._growth[0][0] <= time.monotonic():
            self._usage.allocate(self._device_id, self._growth.pop(0)[1])

    def _sleep_until(self, seconds_s: float) -> None:
        time.sleep(max(0.0, self._started + seconds_s - time.monotonic()))
