"""Parse the CSV of `nvidia-smi --query-gpu=…` and of `--query-compute-apps=…`, with any columns below a header line.

A row without a process id is left out, and a problem says so; a card with no other rows has unknown processes.
"""

from collections.abc import Iterator, Mapping

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes.devices_and_processes import one_per_pid, pci_bus_id, with_distinct_ids
from gpuyard.probes.nvidia.lost_cards import fault_in, lost_devices, only_lost_devices, own_words
from gpuyard.probes.parse_numbers import celsius, megabytes, percent, watts, whole, words
from gpuyard.probes.run_tool import as_problem

_Row = Mapping[str, str]


def parse_csv(text: str) -> Reading:
    """Parse the cards of `--query-gpu`."""
    lost = lost_devices(text)
    header, *rows = _table(text, {"index", "uuid", "gpu_uuid", "name", "gpu_name", "pci.bus_id", "gpu_bus_id"})
    if not header:
        return only_lost_devices(text, "CSV with a header that `nvidia-smi --query-gpu`")
    whole_rows = (dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header))
    return Reading(devices=with_distinct_ids([*map(_read_card, range(len(rows)), whole_rows), *lost]))


def parse_apps(text: str) -> Reading:
    """Return the cards that processes run on; only their ids and processes are known."""
    lost = lost_devices(text)
    header, *rows = _table(text, {"pid"})
    if not header:
        return only_lost_devices(text, "CSV with a header that `nvidia-smi --query-compute-apps`")
    listed = [_app_row(header, row) for row in rows]
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


def _read_card(place: int, row: _Row) -> Device:
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
        power_draw_w=_first_watts(row, "power.draw", "power.draw.average", "power.draw.instant"),
        power_limit_w=_first_watts(row, "enforced.power.limit", "power.limit"),
        temperature_c=celsius(row.get("temperature.gpu")),
        fault=fault_in(row.values()),
    )


def _first_watts(row: _Row, *names: str) -> float | None:
    return next((value for name in names if (value := watts(row.get(name))) is not None), None)


def _app_row(header: list[str], cells: list[str]) -> _Row:
    """Return the cells by column. Surplus cells belong to the process name, which may contain commas."""
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    if place is not None and len(cells) > len(header):
        end = place + 1 + len(cells) - len(header)
        cells = [*cells[:place], ", ".join(cells[place:end]), *cells[end:]]
    return dict(zip(header, cells, strict=False))


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
