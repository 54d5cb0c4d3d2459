"""`radeontop -d - -l 1`, for cards without ROCm: one card's load and video memory, after about a second of sampling.

The bus is hexadecimal, and a card sits on it as device 0, function 0. The size of the memory is computed from the used
share, if that is precise to 1%. A share of zero means that it could not be read: a card in use always uses some."""

import re

from gpuyard.model.machine_snapshot import Device, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.amd import amd_smi
from gpuyard.probes.amd.amd_smi import garbled
from gpuyard.probes.devices_and_processes import pci_bus_id, with_distinct_ids
from gpuyard.probes.run_tool import run_tool

NAME = "radeontop"
_SAMPLE = re.compile(r"^\d+\.\d+: (?:bus ([0-9a-fA-F]{1,2}), )?gpu ([\d.]+%)(.*)$", re.MULTILINE)


def parse(text: str) -> Reading:
    """Parse the output of `radeontop -d -`, with its messages; the last sample of a card counts."""
    samples = {match[1]: match for match in _SAMPLE.finditer(text)}
    if not samples:
        raise garbled(NAME, text)
    return Reading(devices=with_distinct_ids(_device(number, match) for number, match in enumerate(samples.values())))


class RadeonTop:
    def read(self, timeout_s: float) -> Reading:
        """Run the tool until it has printed a sample: releases before 1.0 have no limit and never end."""
        enough = re.compile(rb"gpu [\d.]+%[^\n]*\n").search
        return parse(run_tool((NAME, "-d", "-", "-l", "1"), timeout_s, enough=enough).require_success())


def _device(number: int, match: re.Match[str]) -> Device:
    pci = pci_bus_id(f"{match[1].zfill(2)}:00.0") if match[1] else None
    vram = re.search(r", vram ([\d.]+)% ([\d.]+)mb", match[3])
    share = parse_numbers.number(vram[1]) if vram else None
    used = parse_numbers.megabytes(vram[2]) if vram else None
    total = None
    if not share or not used:
        used = None
    elif share <= 100 and 0.005 / share + 0.005 / used <= 0.01:  # both are rounded to two decimals
        total = round(used * 100 / share, 2)
    return Device(
        id=amd_smi.device_id(None, pci, number),
        vendor=Vendor.AMD,
        pci_bus_id=pci,
        **amd_smi.memory(total, used),
        utilization_percent=parse_numbers.percent(match[2]),
    )
