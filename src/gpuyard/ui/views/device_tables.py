"""A snapshot as people see it: the host in one line, what is wrong, a row per device, and who uses them.

The view takes the room it is given: at 80 columns all figures are there, more room shows longer names and bars, and in
less the least needed columns go first. Unknown is a dash, never a zero.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuyard.core.snapshot import Device, Host, Problem, Snapshot, Vendor
from gpuyard.core.units import UNKNOWN, format_gigabytes, format_size
from gpuyard.probes.common.process_info import ProcessInfo

T = TypeVar("T")
History = Mapping[str, Sequence[float | None]]
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "__..::||"
_GAP = 2
_SHORTEST_NAME = 8
_SHORTEST_BAR, _LONGEST_BAR = 4, 24
_LEAST_NEEDED = ("procs", "temp", "power")
_LEFT = frozenset({"#", "device", "", "user", "command", "lease", "gpus", "label", "without a lease"})


class Extras(Struct, frozen=True, kw_only=True):
    """What a view may show beyond the snapshot itself.

    `expected` are vendors whose GPUs are plugged in, `history` is each device's utilisation of late, `people` are those
    behind the processes. Of more rows than fit into `height` the last are only counted.
    """

    expected: frozenset[Vendor] = frozenset()
    history: dict[str, list[float | None]] | None = None
    people: dict[int, ProcessInfo] | None = None
    height: int | None = None


def snapshot_view(snapshot: Snapshot, out: Console, extras: Extras = Extras()) -> RenderableType:  # noqa: B008 - frozen
    told = worth_telling(snapshot, extras.expected)
    parts: list[RenderableType] = [Text(host_line(snapshot.host), style="bold")] if snapshot.host.name else []
    parts += [_problem_line(problem) for problem in told]
    if not snapshot.devices:
        is_late = any(problem.kind == "timeout" for problem in told)
        found = "No GPU answered in time." if is_late else "No GPU found."
        return Group(*parts, Text(f"{found} `gpuyard doctor` says what was tried."))
    room = None if extras.height is None else max(2, extras.height - len(parts) - 2)
    devices, more = _first(snapshot.devices, room)
    parts.append(_device_table(devices, snapshot.devices, out, extras.history))
    parts += _counted(more, "device")
    if extras.people is not None and not more:
        left = None if room is None else room - len(devices) - 2
        parts += _process_table(snapshot.devices, extras.people, out, left)
    return Group(*parts)


def worth_telling(snapshot: Snapshot, expected: Collection[Vendor]) -> list[Problem]:
    """A tool that is not installed is a problem only where its vendor's GPU is plugged in and nothing else reads it."""
    seen = {device.vendor for device in snapshot.devices}
    return [
        problem
        for problem in snapshot.problems
        if problem.kind != "missing" or (problem.vendor in expected and problem.vendor not in seen)
    ]


def host_line(host: Host) -> str:
    facts = [host.name or "this host"]
    if host.cpu_count is not None:
        facts.append(f"{host.cpu_count:g} CPUs {figure_text(host.cpu_percent, '%')}")
    if host.memory_total_mb is not None:
        used = None if host.memory_available_mb is None else host.memory_total_mb - host.memory_available_mb
        facts.append(f"RAM {memory_text(used, host.memory_total_mb)}")
    if host.load_1m is not None:
        facts.append(f"load {host.load_1m:.1f}")
    if host.limited_by:
        facts.append(f"limited by {host.limited_by}")
    return "  ".join(facts)


def device_label(device: Device, devices: Sequence[Device]) -> str:
    """`0`; `0:1` for a part of card 0; `amd:0` where several vendors are in one machine."""
    parent = next((other for other in devices if other.id == device.parent), None)
    numbers = [other.index for other in (parent, device) if other is not None]
    label = ":".join("?" if number is None else str(number) for number in numbers)
    return f"{device.vendor}:{label}" if len({other.vendor for other in devices}) > 1 else label


def figure_text(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def memory_text(used_mb: float | None, total_mb: float | None) -> str:
    if used_mb is None and total_mb is None:
        return UNKNOWN
    return f"{format_gigabytes(used_mb)}/{format_gigabytes(total_mb)} GB"


def power_text(device: Device) -> str:
    if device.power_draw_w is None and device.power_limit_w is None:
        return UNKNOWN
    draw = UNKNOWN if device.power_draw_w is None else f"{device.power_draw_w:.0f}"
    return f"{draw} W" if device.power_limit_w is None else f"{draw}/{device.power_limit_w:.0f} W"


def _device_table(
    shown: Sequence[Device], devices: Sequence[Device], out: Console, history: History | None
) -> RenderableType:
    rows = [_device_texts(device, devices, out) for device in shown]
    widths = {heading: max(len(heading), *(cell_len(row[heading]) for row in rows)) for heading in rows[0]}
    charts = 1 if history is None else 2
    charts, bar_width = _fit(widths, charts, out.width)
    table = _empty_table()
    for heading, width in widths.items():
        if heading == "memory" and charts:
            _add_column(table, "", bar_width, out)
        _add_column(table, heading, width, out)
        if heading == "use" and charts == 2:
            _add_column(table, "", bar_width, out)
    for device, row in zip(shown, rows, strict=True):
        cells = {heading: [Text(row[heading])] for heading in widths}
        if charts:
            cells["memory"].insert(0, _bar(device, bar_width, out))
        if charts == 2 and history is not None:
            cells["use"].append(_sparkline(history.get(device.id, ()), bar_width, out))
        table.add_row(*(part for cell in cells.values() for part in cell), style="" if device.healthy else "red")
    return table


def _fit(widths: dict[str, int], charts: int, room: int) -> tuple[int, int]:
    """Takes columns out of `widths` until the rest fits, and says how many charts there are and how wide."""

    def spare(charts: int) -> int:
        return room - sum(widths.values()) - _GAP * (len(widths) + charts - 1)

    def shortest(charts: int) -> int:
        return spare(charts) + widths["device"] - _SHORTEST_NAME - charts * _SHORTEST_BAR

    for heading in _LEAST_NEEDED:
        if shortest(charts) < 0:
            del widths[heading]
    while charts and shortest(charts) < 0:
        charts -= 1
    bar_width = max(_SHORTEST_BAR, min(_LONGEST_BAR, spare(charts) // max(1, charts)))
    widths["device"] = max(_SHORTEST_NAME, min(widths["device"], widths["device"] + spare(charts) - charts * bar_width))
    return charts, bar_width


def _device_texts(device: Device, devices: Sequence[Device], out: Console) -> dict[str, str]:
    name = ("  " if device.parent else "") + (device.name or device.id)
    return {
        "#": device_label(device, devices),
        "device": name if device.healthy else f"unhealthy: {name}",
        "memory": memory_text(device.memory_used_mb, device.memory_total_mb),
        "use": figure_text(device.utilization_percent, "%"),
        "power": power_text(device),
        "temp": figure_text(device.temperature_c, "°C" if _is_unicode(out) else "C"),
        "procs": UNKNOWN if device.processes is None else str(len(device.processes)),
    }


def _process_table(
    devices: Sequence[Device], people: Mapping[int, ProcessInfo], out: Console, room: int | None
) -> list[RenderableType]:
    """Who holds what, the greediest of each device first."""
    rows = [
        {
            "#": device_label(device, devices),
            "pid": str(process.pid),
            "user": people.get(process.pid, ProcessInfo()).user or UNKNOWN,
            "memory": format_size(process.memory_mb),
            "command": people.get(process.pid, ProcessInfo()).command or process.name or UNKNOWN,
        }
        for device in devices
        for process in sorted(device.processes or (), key=lambda process: -(process.memory_mb or 0.0))
    ]
    shown, more = _first(rows, room)
    return [Text(""), text_table(shown, out), *_counted(more, "process")] if shown else []


def text_table(rows: Sequence[Mapping[str, str]], out: Console) -> RenderableType:
    """Rows of plain texts under their headings; the last column gets what room the others leave."""
    widths = {heading: max(len(heading), *(cell_len(row[heading]) for row in rows)) for heading in rows[0]}
    last = list(widths)[-1]
    taken = sum(widths.values()) - widths[last] + _GAP * (len(widths) - 1)
    widths[last] = max(_SHORTEST_NAME, min(widths[last], out.width - taken))
    table = _empty_table()
    for heading, width in widths.items():
        _add_column(table, heading, width, out)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def _first(rows: Sequence[T], room: int | None) -> tuple[Sequence[T], int]:
    """Those that there is room for, and how many more there are; a line is kept for saying so."""
    if room is None or len(rows) <= room:
        return rows, 0
    shown = rows[: max(0, room - 1)]
    return shown, len(rows) - len(shown)


def _counted(more: int, what: str) -> list[Text]:
    plural = "" if more == 1 else "es" if what.endswith("s") else "s"
    return [Text(f"and {more} more {what}{plural}: the window is too low", style="dim")] if more else []


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")


def _add_column(table: Table, heading: str, width: int, out: Console) -> None:
    table.add_column(
        heading,
        width=width,
        no_wrap=True,
        overflow="ellipsis" if _is_unicode(out) else "crop",
        justify="left" if heading in _LEFT else "right",
    )


def _bar(device: Device, width: int, out: Console) -> Text:
    if device.memory_used_mb is None or not device.memory_total_mb:
        return Text(UNKNOWN, style="dim")
    share = min(1.0, device.memory_used_mb / device.memory_total_mb)
    # A little is not nothing, and nearly full is not full.
    filled = min(width - (share < 1), max(share > 0, round(share * width)))
    full, empty = ("█", "░") if _is_unicode(out) else ("#", ".")
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble((full * filled, style), (empty * (width - filled), "dim"))


def _sparkline(values: Sequence[float | None], width: int, out: Console) -> Text:
    """As much of the latest past as there is room for."""
    blocks = _BLOCKS if _is_unicode(out) else _ASCII_BLOCKS
    steps = len(blocks) - 1
    latest = [" " if value is None else blocks[min(steps, round(value / 100 * steps))] for value in values[-width:]]
    return Text("".join(latest).rjust(width), style="cyan")


def _problem_line(problem: Problem) -> Text:
    return Text.assemble(("! ", "bold yellow"), str(problem))


def _is_unicode(out: Console) -> bool:
    return out.encoding.lower().startswith("utf")
