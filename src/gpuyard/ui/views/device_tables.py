"""A snapshot as lines for people: the host, problems, a row per device, and the processes that use the devices.

All pure, and fitted to a width: at 80 columns all figures fit, more width goes to names and bars, and with less the
least needed columns are dropped. Unknown is a dash, never a zero.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from gpuyard.core.snapshot import Device, Host, Problem, Snapshot, Vendor
from gpuyard.core.units import UNKNOWN, format_gigabytes, format_size
from gpuyard.probes.common.process_info import ProcessInfo
from gpuyard.ui.cli.text_table import GAP, Column, Line, cell_width, lay_out_lines, make_columns
from gpuyard.ui.views import Frame, bar

T = TypeVar("T")
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "__..::||"
_SHORTEST_BAR, _LONGEST_BAR = 4, 24
_BAR, _SPARKLINE = 2, 5
_DEVICE_COLUMNS = make_columns(
    "#", "device", "", "memory", "use", "", "power", "temp", "procs",
    right=("memory", "use", "power", "temp", "procs"), long=("device",), spare=("", "power", "temp", "procs"),
)  # fmt: skip
_PROCESS_COLUMNS = make_columns("#", "pid", "user", "memory", "command", right=("pid", "memory"), long=("command",))


def snapshot_lines(
    snapshot: Snapshot,
    frame: Frame,
    *,
    expected: Collection[Vendor] = (),
    history: Mapping[str, list[float | None]] | None = None,
    processes: Mapping[int, ProcessInfo] | None = None,
) -> list[Line]:
    """Return the lines; rows beyond the frame's height are only counted.

    `expected` are the vendors of the GPUs on the PCI bus, `history` is each device's recent utilisation, and
    `processes` describes processes by pid; None shows no process table.
    """
    problems = relevant_problems(snapshot, expected)
    lines: list[Line] = [((host_line(snapshot.host), "bold"),)] if snapshot.host.name else []
    lines += [(("! ", "yellow"), (str(problem), None)) for problem in problems]
    if not snapshot.devices:
        is_late = any(problem.kind == "timeout" for problem in problems)
        found = "No GPU answered in time." if is_late else "No GPU found."
        return [*lines, ((f"{found} `gpuyard doctor` shows what was tried.", None),)]
    height = None if frame.height is None else max(2, frame.height - len(lines) - 2)
    devices, more = _first(snapshot.devices, height)
    lines += _device_table(devices, snapshot, frame, history)
    lines += _more_line(more, "device")
    if processes is not None and not more:
        left = None if height is None else height - len(devices) - 2
        lines += _process_table(snapshot, processes, frame, left)
    return lines


def relevant_problems(snapshot: Snapshot, expected: Collection[Vendor]) -> list[Problem]:
    """Leave out tools that are not installed, unless a GPU of their vendor is plugged in and no probe reads it."""
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
    return GAP.join(facts)


def figure_text(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def memory_text(used_mb: float | None, total_mb: float | None, used_at_least_mb: float | None = None) -> str:
    if used_mb is None and used_at_least_mb:
        return f">={format_gigabytes(used_at_least_mb)}/{format_gigabytes(total_mb)} GB"
    if used_mb is None and total_mb is None:
        return UNKNOWN
    return f"{format_gigabytes(used_mb)}/{format_gigabytes(total_mb)} GB"


def power_text(draw_w: float | None, limit_w: float | None) -> str:
    if draw_w is None and limit_w is None:
        return UNKNOWN
    draw = figure_text(draw_w, "")
    return f"{draw} W" if limit_w is None else f"{draw}/{limit_w:.0f} W"


def _device_table(
    shown: Sequence[Device], snapshot: Snapshot, frame: Frame, history: Mapping[str, list[float | None]] | None
) -> list[Line]:
    rows = [_device_texts(device, snapshot, frame) for device in shown]
    columns = list(_DEVICE_COLUMNS)
    if history is None:
        del columns[_SPARKLINE]
    headings = [column.heading for column in columns if column.heading]
    charts = len(columns) - len(headings)
    used = sum(max(map(cell_width, texts)) for texts in zip(headings, *rows, strict=True))
    spare = (frame.columns - used - len(GAP) * (len(columns) - 1)) // charts
    width = max(_SHORTEST_BAR, min(_LONGEST_BAR, spare))
    for device, row in zip(shown, rows, strict=True):
        row.insert(_BAR, _bar(device, width, frame))
        if history is not None:
            row.insert(_SPARKLINE, _sparkline(history.get(device.id, []), width, frame))
    styles = list(map(_device_styles, shown))
    return lay_out_lines(columns, rows, frame.width, frame.ellipsis, styles=styles)


def _device_styles(device: Device) -> dict[str, str | None]:
    if not device.healthy:
        return {column.heading: "red" for column in _DEVICE_COLUMNS}
    share = (device.memory_used_mb or 0.0) / (device.memory_total_mb or 1.0)
    return {"memory": "green" if share < 0.7 else "yellow" if share < 0.9 else "red"}


def _device_texts(device: Device, snapshot: Snapshot, frame: Frame) -> list[str]:
    name = ("  " if device.parent else "") + (device.name or device.id)
    return [
        snapshot.labels.get(device.id, "?"),
        name if device.healthy else f"unhealthy: {name}",
        memory_text(device.memory_used_mb, device.memory_total_mb, device.memory_used_at_least_mb),
        figure_text(device.utilization_percent, "%"),
        power_text(device.power_draw_w, device.power_limit_w),
        figure_text(device.temperature_c, "°C" if frame.is_unicode else "C"),
        UNKNOWN if device.processes is None else str(len(device.processes)),
    ]


def _process_table(
    snapshot: Snapshot, known: Mapping[int, ProcessInfo], frame: Frame, height: int | None
) -> list[Line]:
    """Return the processes of each device, those with the most memory first."""
    rows = [
        [
            snapshot.labels.get(device.id, "?"),
            str(process.pid),
            known.get(process.pid, ProcessInfo()).user or UNKNOWN,
            format_size(process.memory_mb),
            known.get(process.pid, ProcessInfo()).command or process.name or UNKNOWN,
        ]
        for device in snapshot.devices
        for process in sorted(device.processes or (), key=lambda process: -(process.memory_mb or 0.0))
    ]
    shown, more = _first(rows, height)
    return [(), *table_lines(_PROCESS_COLUMNS, shown, frame), *_more_line(more, "process")] if shown else []


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], frame: Frame) -> list[Line]:
    return lay_out_lines(columns, rows, frame.width, frame.ellipsis)


def _first(rows: Sequence[T], height: int | None) -> tuple[Sequence[T], int]:
    """Return the rows that fit and the number of the others; one line is left for that number."""
    if height is None or len(rows) <= height:
        return rows, 0
    shown = rows[: max(0, height - 1)]
    return shown, len(rows) - len(shown)


def _more_line(more: int, what: str) -> list[Line]:
    plural = "" if more == 1 else "es" if what.endswith("s") else "s"
    return [((f"and {more} more {what}{plural}: enlarge the window to see them", "dim"),)] if more else []


def _bar(device: Device, width: int, frame: Frame) -> str:
    if device.memory_used_mb is None or not device.memory_total_mb:
        return UNKNOWN
    return "".join(bar(device.memory_used_mb / device.memory_total_mb, width, frame))


def _sparkline(values: Sequence[float | None], width: int, frame: Frame) -> str:
    blocks = _BLOCKS if frame.is_unicode else _ASCII_BLOCKS
    steps = len(blocks) - 1
    latest = [" " if value is None else blocks[min(steps, round(value / 100 * steps))] for value in values[-width:]]
    return "".join(latest).rjust(width)
