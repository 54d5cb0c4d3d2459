"""What every AMD probe says of a card in the same way, so that it keeps its id whichever probe answers.

Ids:
- "GPU-" and the 16 hexadecimal digits of the card's unique id, as ROCR_VISIBLE_DEVICES takes it; where there is none
  (APUs, many consumer cards), the PCI bus id; where that is unknown too, "amd-" and the card's number.
- Partitions of one card (CPX, DPX) share its unique id under most drivers. ROCr cannot tell them apart by it, and takes
  only their index; so each of them, the first too, gets the id with "#0", "#1", ... behind it, in the order they are
  listed. They have no `parent`: a card in parts is not listed as a whole.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypedDict

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Process
from gpuyard.probes.common import parse_numbers

_UNIQUE_ID = re.compile(r"(?:0x([0-9a-f]{1,16})|(?:GPU-)?([0-9a-f]{16}))", re.IGNORECASE)
_UUID = re.compile(r"([0-9a-f]{2})[0-9a-f]{6}-0000-1000-80([0-9a-f]{2})-([0-9a-f]{12})", re.IGNORECASE)
_HEX_NUMBER = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)
_MOST_CARDS = 65535
_LARGEST_PID = 2**31 - 1


class CardMemory(TypedDict):
    """The fields of a Device that are about its memory."""

    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_free_mb: float | None


def unique_id(raw: Any) -> str | None:
    """The 16 digits of "0x2150e7d042a1124" and the like; zero is what a card without one reports."""
    match = _UNIQUE_ID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None
    digits = (match[1] or match[2]).lower().zfill(16)
    return None if set(digits) in ({"0"}, {"f"}) else digits


def unique_id_in_uuid(raw: Any) -> str | None:
    """AMD SMI's UUID is made of the unique id: "af......-0000-1000-8054-e92b0a5d57c8" holds "af54e92b0a5d57c8".

    Below 2**32 it is not one: under WSL the library fills in the PCI address.
    """
    match = _UUID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    digits = unique_id(match[1] + match[2] + match[3]) if match else None
    return digits if digits and not digits.startswith("0" * 8) else None


def card_index(raw: Any) -> int | None:
    index = parse_numbers.whole(raw)
    return index if index is not None and index <= _MOST_CARDS else None


def card_name(*candidates: Any) -> str | None:
    """The first that is a name; a bare "0x1002" is what tools print where the PCI id database lacks the card."""
    names = (parse_numbers.words(raw) for raw in candidates)
    return next((name for name in names if name and not _HEX_NUMBER.fullmatch(name)), None)


def device_id(unique: str | None, pci: str | None, number: int) -> str:
    return f"GPU-{unique}" if unique else pci or f"amd-{number}"


def id_rank(device: Device) -> int:
    """How well the id names the card: 0 is best."""
    return 0 if device.id.startswith("GPU-") else 2 if device.id.startswith("amd-") else 1


def memory(total: float | None, used: float | None, free: float | None = None) -> CardMemory:
    """A total of zero means that none of the three was read."""
    if total == 0:
        total = used = free = None
    if free is None and total is not None and used is not None:
        free = round(max(0.0, total - used), 2)
    return CardMemory(memory_total_mb=total, memory_used_mb=used, memory_free_mb=free)


def power_limit(*candidates: float | None) -> float | None:
    """The first cap that is one: releases print 0 W where there is none."""
    return next((limit for limit in candidates if limit), None)


def process(pid: Any, name: Any, memory_mb: float | None) -> Process | None:
    number = parse_numbers.whole(pid)
    if number is None or not 0 < number <= _LARGEST_PID:
        return None
    return Process(pid=number, memory_mb=memory_mb, name=parse_numbers.words(name))


def process_memory(usage: Any, whole: Any) -> float | None:
    """VRAM in MB, from AMD SMI's `memory_usage` in parts and its one figure for the `whole`, both in bytes.

    The parts come from /proc/PID/fdinfo, which is closed for another user's process: they are zero then, and the whole,
    which the driver gives, is the VRAM. Where it is no more than the parts outside the card it is not. Where all are
    zero nothing was read: a process on a card holds some memory somewhere.
    """
    parts = usage if isinstance(usage, dict) else {}
    vram, gtt, cpu = (parse_numbers.megabytes(parts.get(key), "B") for key in ("vram_mem", "gtt_mem", "cpu_mem"))
    outside = (gtt or 0.0) + (cpu or 0.0)
    everything = parse_numbers.megabytes(whole, "B") or 0.0
    if vram or not outside:
        return vram or everything or None
    return everything if everything > outside else vram


def without_repeated_memory(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices, with unknown memory for a process that several cards list with the same figure.

    Releases of AMD SMI (seen with ROCm 7.2) list every process on every card, each time with all that it holds: how
    much of that is on which card, and whether any, cannot be told.
    """
    listed = tuple(devices)
    times = Counter(
        held
        for device in listed
        for held in {(process.pid, process.memory_mb) for process in device.processes or ()}
        if held[1] is not None
    )
    return tuple(
        replace(device, processes=tuple(_with_sure_memory(process, times) for process in device.processes))
        if device.processes
        else device
        for device in listed
    )


def _with_sure_memory(process: Process, times: Counter[tuple[int, float | None]]) -> Process:
    return replace(process, memory_mb=None) if times[process.pid, process.memory_mb] > 1 else process
