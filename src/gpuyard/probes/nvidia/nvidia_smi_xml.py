"""Parse the output of `nvidia-smi -q -x`, of any driver release.

Sections were renamed over the years (`power_readings`, then `gpu_power_readings`), so each figure has a list of
paths, and the newest is tried first. A truncated document yields its complete cards, and a problem that says so.
"""

import re
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from gpuyard.core.health_figures import HealthFigures
from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.parse_numbers import celsius, megabytes, percent, watts, whole, words
from gpuyard.probes.common.probe_calls import as_problem
from gpuyard.probes.common.process_info import larger_mb, one_per_pid
from gpuyard.probes.nvidia.lost_cards import fault_in, lost_devices, only_lost_devices, own_words
from gpuyard.probes.nvidia.nvidia_smi_health import health_in

_START = re.compile(r"<nvidia_smi_log[\s>]")
_END = "</nvidia_smi_log>"
_DRAW = ("power_draw", "average_power_draw", "instant_power_draw")
_LIMIT = ("enforced_power_limit", "current_power_limit", "power_limit")


def parse_xml(text: str) -> Reading:
    start = _START.search(text)
    lost = lost_devices(text)
    if start is None:
        return only_lost_devices(text, "XML that `nvidia-smi -q -x`")
    document, end, _ = text[start.start() :].partition(_END)
    cards, is_whole = _complete_cards(document + end)
    cut = None if is_whole and end else ProbeGarbled("nvidia-smi", f"the XML breaks off after {len(cards)} whole GPUs")
    if cut and not cards and not lost:
        raise cut
    devices = [device for index, card in enumerate(cards) for device in _read_card(index, card)]
    listed = {device.pci_bus_id for device in devices}
    return Reading(
        devices=with_distinct_ids([*devices, *(gone for gone in lost if gone.pci_bus_id not in listed)]),
        problems=(as_problem(cut, Vendor.NVIDIA),) if cut else (),
    )


def _complete_cards(document: str) -> tuple[list[Element], bool]:
    """Return the complete cards, and whether the XML was read to its end."""
    parser: Any = XMLPullParser(["end"])
    parser.feed(document)
    cards: list[Element] = []
    try:
        # The parser reports broken XML only here, after all elements before the break.
        cards.extend(element for _, element in parser.read_events() if element.tag == "gpu")
    except ParseError:
        return cards, False
    return cards, True


def _read_card(index: int, card: Element) -> Iterator[Device]:
    bus_id = pci_bus_id(card.get("id")) or pci_bus_id(card.findtext("pci/pci_bus_id"))
    card_id = own_words(card.findtext("uuid")) or bus_id or f"nvidia-{index}"
    fault, utilization = fault_in(_figures(card)), percent(card.findtext("utilization/gpu_util"))
    health = HealthFigures(is_lost=True) if fault is not None else health_in(card, utilization)
    device = Device(
        id=card_id,
        vendor=Vendor.NVIDIA,
        index=index,
        name=own_words(card.findtext("product_name")),
        pci_bus_id=bus_id,
        **_memory(card),
        utilization_percent=utilization,
        power_draw_w=_power(card, _DRAW),
        power_limit_w=_power(card, _LIMIT),
        temperature_c=celsius(card.findtext("temperature/gpu_temp")),
        processes=_processes(card, None),
        fault=fault,
        health=health,
    )
    yield device
    for place, part in enumerate(card.iterfind("mig_devices/mig_device")):
        yield _read_part(place, part, card, device)


def _read_part(place: int, part: Element, card: Element, whole_card: Device) -> Device:
    gpu_instance, compute_instance = part.findtext("gpu_instance_id"), part.findtext("compute_instance_id")
    index = whole(part.findtext("index"))
    return Device(
        # CUDA accepts a MIG instance by its own UUID, or by the card's UUID with both instance numbers.
        id=words(part.findtext("uuid")) or f"MIG-{whole_card.id}/{gpu_instance}/{compute_instance}",
        vendor=Vendor.NVIDIA,
        index=place if index is None else index,
        name=f"{whole_card.name or 'NVIDIA'} MIG {gpu_instance}/{compute_instance}",
        parent=whole_card.id,
        pci_bus_id=whole_card.pci_bus_id,
        **_memory(part),
        processes=_processes(card, (gpu_instance, compute_instance)),
    )


def _figures(card: Element) -> Iterator[str | None]:
    """Return the texts of the card's fields, without process names, which any user can choose."""
    for section in card:
        if not section.tag.endswith("processes"):
            yield from (element.text for element in section.iter())


def _memory(of: Element) -> dict[str, Any]:
    figures = ("total", "used", "free")
    return {f"memory_{figure}_mb": megabytes(of.findtext(f"fb_memory_usage/{figure}")) for figure in figures}


def _power(card: Element, figures: tuple[str, ...]) -> float | None:
    paths = (f"{section}/{figure}" for section in ("gpu_power_readings", "power_readings") for figure in figures)
    return next((value for path in paths if (value := watts(card.findtext(path))) is not None), None)


def _processes(card: Element, instance: tuple[str | None, str | None] | None) -> tuple[Process, ...] | None:
    """Return the processes of the card, or of one instance of it, or None if the driver does not list them."""
    section = card.find("processes")
    if section is None or (len(section) == 0 and (section.text or "").strip()):
        return None
    found = []
    for entry in section.iterfind("process_info"):
        pid = whole(entry.findtext("pid"))
        runs_in = (entry.findtext("gpu_instance_id"), entry.findtext("compute_instance_id"))
        if pid is not None and instance in (None, runs_in):
            name = words(entry.findtext("process_name"))
            found.append(Process(pid=pid, memory_mb=megabytes(entry.findtext("used_memory")), name=name))
    return one_per_pid(found, larger_mb)
