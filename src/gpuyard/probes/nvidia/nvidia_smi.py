"""NVIDIA devices through `nvidia-smi`, for machines where NVML fails; and saved outputs of it, also as CSV.

One call for the XML returns everything; sections were renamed over the years, so each figure has a list of paths, the
newest first. A truncated document yields its complete cards, and a problem that says so."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, HealthFigures, Process, Reading, Throttle, Vendor
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.probes.devices_and_processes import one_per_pid, pci_bus_id, with_distinct_ids
from gpuyard.probes.parse_numbers import celsius, megabytes, percent, watts, whole, words
from gpuyard.probes.run_tool import as_problem, problem_beside, run_tool

# What the tool prints about cards that do not answer


def lost_devices(text: str) -> tuple[Device, ...]:
    """Return the cards that lines of `text` report as lost, by bus id."""
    lost = []
    for line in text.splitlines():
        said = re.search(r"unable to determine the device handle for (.*)", line, re.IGNORECASE)
        bus = said and re.search(
            r"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{8}|[0-9A-Fa-f]{4})(?::[0-9A-Fa-f]{2}){2}\.[0-7]", said[1]
        )
        if said and bus and (bus_id := pci_bus_id(bus[0])):
            fault = said[1][bus.end() :].strip(" :") or line.strip()
            lost.append(Device(id=bus_id, vendor=Vendor.NVIDIA, pci_bus_id=bus_id, fault=fault))
    return with_distinct_ids(lost)


def fault_in(fields: Iterable[str | None]) -> str | None:
    """Return the first field that says the card is lost, or None. The driver prints it in place of any figure."""
    gone = re.compile(r"gpu is lost|fallen off the bus|gpu requires re(?:set|start)|reboot the system", re.IGNORECASE)
    return next((field.strip(" []") for field in fields if field and gone.search(field)), None)


def own_words(field: str | None) -> str | None:
    """Return the name, or None if the field reports a lost card instead."""
    return None if fault_in((field,)) else words(field)


def only_lost_devices(text: str, expected: str) -> Reading:
    """Return the reading of an output that lists no cards; raise if it is neither lost cards nor none at all."""
    failures = "nvidia-smi has failed|failed to initialize nvml|couldn't communicate with the nvidia driver"
    if refusal := re.search(rf"^.*(?:{failures}).*$", text, re.IGNORECASE | re.MULTILINE):
        raise ProbeCrashed("nvidia-smi", refusal[0].strip()[:200], hint="see dmesg for what the driver says")
    lost = lost_devices(text)
    if lost or re.search(r"^\s*no devices were found\s*$", text, re.IGNORECASE | re.MULTILINE):
        return Reading(devices=lost)
    raise ProbeGarbled("nvidia-smi", f"this is not the {expected} prints")


# XML

_THROTTLES = {
    Throttle.SW_THERMAL: "sw_thermal_slowdown",
    Throttle.HW_THERMAL: "hw_thermal_slowdown",
    Throttle.POWER_BRAKE: "hw_power_brake_slowdown",
    Throttle.HW_SLOWDOWN: "hw_slowdown",
}
_DRAW = ("power_draw", "average_power_draw", "instant_power_draw")
_LIMIT = ("enforced_power_limit", "current_power_limit", "power_limit")


def parse_xml(text: str) -> Reading:
    start, lost = re.search(r"<nvidia_smi_log[\s>]", text), lost_devices(text)
    if start is None:
        return only_lost_devices(text, "XML that `nvidia-smi -q -x`")
    document, end, _ = text[start.start() :].partition("</nvidia_smi_log>")
    parser: Any = XMLPullParser(["end"])
    parser.feed(document + end)
    cards: list[Element] = []
    try:
        # The parser reports broken XML only here, after all elements before the break.
        cards.extend(element for _, element in parser.read_events() if element.tag == "gpu")
    except ParseError:
        end = ""
    cut = None if end else ProbeGarbled("nvidia-smi", f"the XML breaks off after {len(cards)} whole GPUs")
    if cut and not cards and not lost:
        raise cut
    devices = [device for index, card in enumerate(cards) for device in _read_card(index, card)]
    listed = {device.pci_bus_id for device in devices}
    return Reading(
        devices=with_distinct_ids([*devices, *(gone for gone in lost if gone.pci_bus_id not in listed)]),
        problems=(as_problem(cut, Vendor.NVIDIA),) if cut else (),
    )


def _read_card(index: int, card: Element) -> Iterator[Device]:
    bus_id = pci_bus_id(card.get("id")) or pci_bus_id(card.findtext("pci/pci_bus_id"))
    card_id = own_words(card.findtext("uuid")) or bus_id or f"nvidia-{index}"
    fault, utilization = fault_in(_figures(card)), percent(card.findtext("utilization/gpu_util"))
    health = HealthFigures(is_lost=True) if fault is not None else _health(card, utilization)
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
        instance = part.findtext("gpu_instance_id"), part.findtext("compute_instance_id")
        number, names = whole(part.findtext("index")), f"{instance[0]}/{instance[1]}"
        yield Device(
            # CUDA accepts a MIG instance by its own UUID, or by the card's UUID with both instance numbers.
            id=words(part.findtext("uuid")) or f"MIG-{card_id}/{names}",
            vendor=Vendor.NVIDIA,
            index=place if number is None else number,
            name=f"{device.name or 'NVIDIA'} MIG {names}",
            parent=card_id,
            pci_bus_id=bus_id,
            **_memory(part),
            processes=_processes(card, instance),
        )


def _health(card: Element, utilization_percent: float | None) -> HealthFigures:
    lanes = (card.findtext(f"pci/pci_gpu_link_info/link_widths/{each}_link_width") for each in ("current", "max"))
    width, most = (None if text is None else whole(text.strip().removesuffix("x")) for text in lanes)
    is_busy = (utilization_percent or 0.0) > IDLE_PERCENT
    is_certain = width is not None and most is not None and (is_busy or width >= most)
    rows = (card.findtext(f"remapped_rows/remapped_row_{each}") for each in ("pending", "failure"))
    pending, failed = ({"Yes": True, "No": False}.get((text or "").strip()) for text in rows)
    uncorrected, section = None, card.find("ecc_errors/volatile")
    if section is not None:
        uncorrected = whole(section.findtext("double_bit/total"))  # of older drivers
        counts = [whole(each.text) for each in section if "uncorrectable" in each.tag]
        if uncorrected is None and any(count is not None for count in counts):
            uncorrected = sum(count or 0 for count in counts)
    return HealthFigures(
        ecc_uncorrected=uncorrected,
        remap_pending=pending,
        remap_failed=failed,
        throttle=_throttle(card),
        link_width=width if is_certain else None,
        link_width_max=most,
    )


def _throttle(card: Element) -> tuple[Throttle, ...] | None:
    for name in ("clocks_event_reason", "clocks_throttle_reason"):
        section = card.find(f"{name}s")
        if section is not None:
            states = {each: (section.findtext(f"{name}_{field}") or "").strip() for each, field in _THROTTLES.items()}
            is_known = any(state in ("Active", "Not Active") for state in states.values())
            return tuple(each for each, state in states.items() if state == "Active") if is_known else None
    return None


def _figures(card: Element) -> Iterator[str | None]:
    """Return the texts of the card's fields, without process names, which any user can choose."""
    for section in card:
        if not section.tag.endswith("processes"):
            yield from (element.text for element in section.iter())


def _memory(of: Element) -> dict[str, Any]:
    figures = ("total", "used", "free")
    return {f"memory_{figure}_mb": megabytes(of.findtext(f"fb_memory_usage/{figure}")) for figure in figures}


def _power(card: Element, figures: tuple[str, ...]) -> float | None:
    sections = ("gpu_power_readings", "power_readings")
    return _first_watts(card.findtext(f"{section}/{figure}") for section in sections for figure in figures)


def _first_watts(texts: Iterable[str | None]) -> float | None:
    return next((value for text in texts if (value := watts(text)) is not None), None)


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
    return one_per_pid(found)


class NvidiaSmi:
    def read(self, timeout_s: float) -> Reading:
        """Parse the XML. If the tool failed after listing some cards, more may exist: a lost card is why it failed."""
        output = run_tool(("nvidia-smi", "-q", "-x"), timeout_s)
        reading = output.read(parse_xml)
        if output.status == 0 or any(not device.healthy for device in reading.devices):
            return reading
        return replace(reading, problems=(*reading.problems, problem_beside(output.failure(), Vendor.NVIDIA)))


# CSV of `--query-gpu=…` and `--query-compute-apps=…`, with any columns below a header line

_Row = Mapping[str, str]


def parse_csv(text: str) -> Reading:
    """Parse the cards of `--query-gpu`."""
    lost = lost_devices(text)
    header, *rows = _table(text, {"index", "uuid", "gpu_uuid", "name", "gpu_name", "pci.bus_id", "gpu_bus_id"})
    if not header:
        return only_lost_devices(text, "CSV with a header that `nvidia-smi --query-gpu`")
    whole_rows = (dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header))
    return Reading(devices=with_distinct_ids([*map(_card_of_row, range(len(rows)), whole_rows), *lost]))


def parse_apps(text: str) -> Reading:
    """Return the cards that processes run on; only their ids and processes are known."""
    lost = lost_devices(text)
    header, *rows = _table(text, {"pid"})
    if not header:
        return only_lost_devices(text, "CSV with a header that `nvidia-smi --query-compute-apps`")
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    listed: list[_Row] = []
    for cells in rows:
        if place is not None and len(cells) > len(header):  # commas in the name of the process
            end = place + 1 + len(cells) - len(header)
            cells[place:end] = [", ".join(cells[place:end])]
        listed.append(dict(zip(header, cells, strict=False)))
    nameless = sum(whole(row.get("pid")) is None for row in listed)
    message = f"{nameless} of {len(rows)} rows of `--query-compute-apps` have no process id and are left out"
    problem = as_problem(ProbeGarbled("nvidia-smi", message), Vendor.NVIDIA)
    return Reading(devices=with_distinct_ids([*_cards_of_apps(listed), *lost]), problems=(problem,) if nameless else ())


def _table(text: str, titles: set[str]) -> list[list[str]]:
    """Return the cells of the header, the first line with one of these titles, and of all lines below it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    for place, row in enumerate(rows):
        header = [cell.partition(" [")[0] for cell in row]  # `memory.total [MiB]` is in that unit
        if not titles.isdisjoint(header):
            return [header, *rows[place + 1 :]]
    return [[]]


def _card_of_row(place: int, row: _Row) -> Device:
    index = whole(row.get("index"))
    index = place if index is None else index
    bus_id = pci_bus_id(row.get("pci.bus_id", row.get("gpu_bus_id")))
    return Device(
        id=own_words(row.get("uuid", row.get("gpu_uuid"))) or bus_id or f"nvidia-{index}",
        vendor=Vendor.NVIDIA,
        index=index,
        name=own_words(row.get("name", row.get("gpu_name"))),
        pci_bus_id=bus_id,
        memory_total_mb=megabytes(row.get("memory.total")),
        memory_used_mb=megabytes(row.get("memory.used")),
        memory_free_mb=megabytes(row.get("memory.free")),
        utilization_percent=percent(row.get("utilization.gpu")),
        power_draw_w=_first_watts(map(row.get, ("power.draw", "power.draw.average", "power.draw.instant"))),
        power_limit_w=_first_watts(map(row.get, ("enforced.power.limit", "power.limit"))),
        temperature_c=celsius(row.get("temperature.gpu")),
        fault=fault_in(row.values()),
    )


def _cards_of_apps(rows: list[_Row]) -> Iterator[Device]:
    cards: dict[str, tuple[_Row, list[Process]]] = {}
    for row in rows:
        pid = whole(row.get("pid"))
        card = words(row.get("gpu_uuid")) or pci_bus_id(row.get("gpu_bus_id"))
        if pid is None and card is None:
            continue
        _, processes = cards.setdefault(card or "nvidia-0", (row, []))
        if pid is not None:
            memory_mb = megabytes(row.get("used_gpu_memory", row.get("used_memory")))
            name = words(row.get("process_name", row.get("name")))
            processes.append(Process(pid=pid, memory_mb=memory_mb, name=name))
    for card, (row, processes) in cards.items():
        yield Device(
            id=card,
            vendor=Vendor.NVIDIA,
            name=words(row.get("gpu_name")),
            pci_bus_id=pci_bus_id(row.get("gpu_bus_id")),
            processes=one_per_pid(processes) if processes else None,
        )
