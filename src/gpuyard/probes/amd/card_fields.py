"""Fields that all AMD probes fill in the same way, so that a card keeps its id with every probe.

Ids:
- "GPU-" and the 16 hexadecimal digits of the card's unique id, as ROCR_VISIBLE_DEVICES accepts it; without a unique
  id (APUs, many consumer cards), the PCI bus id; if that is unknown too, "amd-" and the card's number.
- Partitions of one card (CPX, DPX) share its unique id under most drivers. ROCr accepts only their index, so each
  partition, including the first, gets the id with "#0", "#1", ... appended, in list order. They have no `parent`: a
  partitioned card is not listed as a whole.
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
    """Return the 16 digits of an id such as "0x2150e7d042a1124", or None for zero, which means no id."""
    match = _UNIQUE_ID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None
    digits = (match[1] or match[2]).lower().zfill(16)
    return None if set(digits) in ({"0"}, {"f"}) else digits


def unique_id_in_uuid(raw: Any) -> str | None:
    """Return the unique id in AMD SMI's UUID: "af......-0000-1000-8054-e92b0a5d57c8" contains "af54e92b0a5d57c8".

    Values below 2**32 are no ids: under WSL the library fills in the PCI address.
    """
    match = _UUID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    digits = unique_id(match[1] + match[2] + match[3]) if match else None
    return digits if digits and not digits.startswith("0" * 8) else None


def card_index(raw: Any) -> int | None:
    index = parse_numbers.whole(raw)
    return index if index is not None and index <= _MOST_CARDS else None


def card_name(*candidates: Any) -> str | None:
    """Return the first real name; tools print a bare "0x1002" if the PCI id database lacks the card."""
    names = (parse_numbers.words(raw) for raw in candidates)
    return next((name for name in names if name and not _HEX_NUMBER.fullmatch(name)), None)


def device_id(unique: str | None, pci: str | None, number: int) -> str:
    return f"GPU-{unique}" if unique else pci or f"amd-{number}"


def id_rank(device: Device) -> int:
    """Return how specific the id is; 0 is best."""
    return 0 if device.id.startswith("GPU-") else 2 if device.id.startswith("amd-") else 1


def memory(total: float | None, used: float | None, free: float | None = None) -> CardMemory:
    """Return the memory fields; a total of zero means that none of them was read."""
    if total == 0:
        total = used = free = None
    if free is None and total is not None and used is not None:
        free = round(max(0.0, total - used), 2)
    return CardMemory(memory_total_mb=total, memory_used_mb=used, memory_free_mb=free)


def power_limit(*candidates: float | None) -> float | None:
    """Return the first cap above 0 W; releases print 0 W for no cap."""
    return next((limit for limit in candidates if limit), None)


def process(pid: Any, name: Any, memory_mb: float | None) -> Process | None:
    number = parse_numbers.whole(pid)
    if number is None or not 0 < number <= _LARGEST_PID:
        return None
    return Process(pid=number, memory_mb=memory_mb, name=parse_numbers.words(name))


def process_memory(usage: Any, whole: Any) -> float | None:
    """Return VRAM in MB, from AMD SMI's `memory_usage` in parts and its total `whole`, both in bytes.

    The parts come from /proc/PID/fdinfo, which is unreadable for another user's process: then they are zero, and the
    total from the driver is the VRAM, unless it is at most the parts outside the card. All zero means that nothing was
    read: a process on a card holds some memory.
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

    Some releases of AMD SMI (seen with ROCm 7.2) list every process on every card with its total memory, so its memory
    per card is unknown.
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
