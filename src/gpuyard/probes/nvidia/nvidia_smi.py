"""NVIDIA devices through `nvidia-smi`, for machines where NVML cannot be loaded.

One call for the XML returns everything; sections were renamed over the years, so each figure has a list of paths, the
newest first. A truncated document yields its complete cards, and a problem that says so. If the XML cannot be read, two
calls for the CSV return most of it. If a lost card keeps the tool from listing the others, they are queried by bus id.
Xids are in no output: they come from the kernel's log.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, HealthFigures, Process, Reading, Throttle, Vendor, XidEvent
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.probes.devices_and_processes import larger_mb, one_per_pid, pci_bus_id, with_distinct_ids
from gpuyard.probes.nvidia.lost_cards import (
    MOST_REMEMBERED,
    KernelCard,
    KernelLog,
    fault_in,
    list_kernel_cards,
    lost_devices,
    only_lost_devices,
    own_words,
)
from gpuyard.probes.nvidia.nvidia_smi_csv import parse_apps, parse_csv
from gpuyard.probes.parse_numbers import celsius, megabytes, percent, watts, whole, words
from gpuyard.probes.run_tool import Deadline, ToolOutput, as_problem, problem_beside, run_until

_NAMES = {
    Throttle.SW_THERMAL: "sw_thermal_slowdown",
    Throttle.HW_THERMAL: "hw_thermal_slowdown",
    Throttle.POWER_BRAKE: "hw_power_brake_slowdown",
    Throttle.HW_SLOWDOWN: "hw_slowdown",
}
_REASONS = ("clocks_event_reason", "clocks_throttle_reason")


def health_in(card: Element, utilization_percent: float | None) -> HealthFigures:
    width, most = _lanes(card, "current_link_width"), _lanes(card, "max_link_width")
    is_busy = (utilization_percent or 0.0) > IDLE_PERCENT
    is_certain = width is not None and most is not None and (is_busy or width >= most)
    return HealthFigures(
        ecc_uncorrected=_uncorrected(card),
        remap_pending=_yes(card.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=_yes(card.findtext("remapped_rows/remapped_row_failure")),
        throttle=_throttle(card),
        link_width=width if is_certain else None,
        link_width_max=most,
    )


def with_xids(devices: Sequence[Device], xids: Mapping[str, tuple[XidEvent, ...]]) -> tuple[Device, ...]:
    """Return the devices with the Xids of their cards, given by PCI bus id."""
    found = []
    for device in devices:
        events = xids.get(device.pci_bus_id or "") if device.parent is None else None
        health = None if events is None else replace(device.health or HealthFigures(), xids=events)
        found.append(device if health is None else replace(device, health=health))
    return tuple(found)


def _uncorrected(card: Element) -> int | None:
    section = card.find("ecc_errors/volatile")
    if section is None:
        return None
    older = whole(section.findtext("double_bit/total"))
    if older is not None:
        return older
    counts = [whole(each.text) for each in section if "uncorrectable" in each.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _throttle(card: Element) -> tuple[Throttle, ...] | None:
    for name in _REASONS:
        section = card.find(f"{name}s")
        if section is not None:
            states = {each: (section.findtext(f"{name}_{field}") or "").strip() for each, field in _NAMES.items()}
            is_known = any(state in ("Active", "Not Active") for state in states.values())
            return tuple(each for each, state in states.items() if state == "Active") if is_known else None
    return None


def _lanes(card: Element, field: str) -> int | None:
    text = card.findtext(f"pci/pci_gpu_link_info/link_widths/{field}")
    return None if text is None else whole(text.strip().removesuffix("x"))


def _yes(text: str | None) -> bool | None:
    return {"Yes": True, "No": False}.get((text or "").strip())


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


_XML = ("nvidia-smi", "-q", "-x")
_COLUMNS = (
    "index,uuid,name,pci.bus_id,memory.total,memory.used,memory.free,utilization.gpu,power.draw,enforced.power.limit,"
    "temperature.gpu"
)
_GPUS = ("nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv")
_APPS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name", "--format=csv")


class NvidiaSmi:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kernel_log = KernelLog(root)
        self._xids: dict[str, tuple[XidEvent, ...]] = {}

    def read(self, timeout_s: float) -> Reading:
        for bus_id, code in self._kernel_log.new_xids():
            events = (*self._xids.get(bus_id, ()), XidEvent(code=code, at=time.time()))
            self._xids[bus_id] = events[-MOST_REMEMBERED:]
        reading = self._read(timeout_s)
        return replace(reading, devices=with_xids(reading.devices, self._xids)) if self._xids else reading

    def _read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        output = run_until(_XML, deadline)
        try:
            reading = _read_xml(output)
        except (ProbeGarbled, ProbeCrashed) as error:
            return _read_csv_instead(error, deadline)
        if reading.devices and not any(device.healthy for device in reading.devices):
            return self._read_around(reading, deadline)
        return reading

    def _read_around(self, lost: Reading, deadline: Deadline) -> Reading:
        """Read the other cards by bus id, and number all cards as the kernel does."""
        places = {card.pci_bus_id: (index, card) for index, card in enumerate(list_kernel_cards(self._root))}
        unknown = (None, KernelCard(pci_bus_id=None))
        gone, well = [], []
        for device in lost.devices:
            index, card = places.get(device.pci_bus_id, unknown)
            gone.append(replace(device, id=card.uuid or device.id, name=device.name or card.name, index=index))
        lost_at = {device.pci_bus_id for device in gone}
        others = [bus_id for bus_id in places if bus_id and bus_id not in lost_at]
        found = Reading()
        if others:
            try:
                found = _read_xml(run_until([*_XML, "-i", ",".join(others)], deadline))
            except ProbeError as error:
                found = Reading(problems=(problem_beside(error, Vendor.NVIDIA, "the other GPUs"),))
        for device in found.devices:
            index, _ = unknown if device.parent else places.get(device.pci_bus_id, unknown)
            well.append(device if index is None else replace(device, index=index))
        return Reading(
            devices=tuple(sorted([*well, *gone], key=lambda device: (device.index is None, device.index))),
            problems=(*lost.problems, *found.problems),
        )


def _read_xml(output: ToolOutput) -> Reading:
    """Parse the XML. If the tool failed after listing some cards, more may exist: a lost card is why it failed."""
    try:
        reading = parse_xml(output.stdout)
    except ProbeGarbled:
        if output.status != 0:
            raise output.failure() from None
        raise
    if output.status == 0 or any(not device.healthy for device in reading.devices):
        return reading
    return replace(reading, problems=(*reading.problems, problem_beside(output.failure(), Vendor.NVIDIA)))


def _read_csv_instead(error: ProbeError, deadline: Deadline) -> Reading:
    """Return the reading from CSV. If that fails too, raise the first error, which says more."""
    try:
        cards = parse_csv(run_until(_GPUS, deadline).require_success())
    except ProbeError:
        raise error from None
    try:
        apps = parse_apps(run_until(_APPS, deadline).require_success())
    except ProbeError as hidden:
        problem = problem_beside(hidden, Vendor.NVIDIA, "who uses the GPUs is unknown")
        return replace(cards, problems=(*cards.problems, problem))
    processes = {device.id: device.processes for device in apps.devices}
    return Reading(
        devices=tuple(replace(card, processes=processes.get(card.id, ())) for card in cards.devices),
        problems=(*cards.problems, *apps.problems),
    )
