"""A snapshot as people see it: the host in one line, a row per device, and what is wrong below.

The view takes the width it is given: at 80 columns all figures are there, more room shows longer names and bars.
Unknown is a dash, never a zero.
"""

from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gpuyard.core.model import Device, Host, Problem, Snapshot, Vendor

UNKNOWN = "-"
History = Mapping[str, Sequence[float | None]]
_GAP = 2
_SHORTEST_NAME = 8
_SHORTEST_BAR, _LONGEST_BAR = 4, 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "__..::||"


def snapshot_view(
    snapshot: Snapshot,
    out: Console,
    expected: Collection[Vendor] = (),
    history: History | None = None,
) -> RenderableType:
    """`expected` are vendors whose GPUs are plugged in; `history` is each device's utilisation of late."""
    parts: list[RenderableType] = [Text(host_line(snapshot.host), style="bold")] if snapshot.host.name else []
    if snapshot.devices:
        parts.append(_device_table(snapshot, out, history))
    else:
        parts.append(Text("No GPU found. `gpuyard doctor` says what was tried."))
    parts += [_problem_line(problem) for problem in worth_telling(snapshot, expected)]
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
        facts.append(f"{host.cpu_count:g} CPUs {_figure(host.cpu_percent, '%')}")
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


def memory_text(used_mb: float | None, total_mb: float | None) -> str:
    if used_mb is None and total_mb is None:
        return UNKNOWN
    used = UNKNOWN if used_mb is None else f"{used_mb / 1024:.1f}"
    return f"{used}/{UNKNOWN if total_mb is None else f'{total_mb / 1024:.1f}'} GB"


def power_text(device: Device) -> str:
    if device.power_draw_w is None and device.power_limit_w is None:
        return UNKNOWN
    draw = UNKNOWN if device.power_draw_w is None else f"{device.power_draw_w:.0f}"
    return f"{draw} W" if device.power_limit_w is None else f"{draw}/{device.power_limit_w:.0f} W"


def _device_table(snapshot: Snapshot, out: Console, history: History | None) -> RenderableType:
    """Figures are never cut. Names get what room those leave, then bars and charts share the rest."""
    rows = [_texts(device, snapshot.devices, out) for device in snapshot.devices]
    columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
    widths = {heading: max(len(heading), *map(cell_len, texts)) for heading, texts in columns.items()}
    drawn = 1 if history is None else 2
    spare = out.width - sum(widths.values()) - _GAP * (len(widths) + drawn - 1)
    bar_width = max(_SHORTEST_BAR, min(_LONGEST_BAR, spare // drawn))
    widths["device"] = max(_SHORTEST_NAME, min(widths["device"], widths["device"] + spare - bar_width * drawn))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for heading, width in widths.items():
        justify: JustifyMethod = "left" if heading in {"#", "device"} else "right"
        if heading == "memory":
            table.add_column("", width=bar_width)
        table.add_column(heading, width=width, no_wrap=True, overflow="ellipsis", justify=justify)
        if heading == "use" and history is not None:
            table.add_column("", width=bar_width)
    for device, row in zip(snapshot.devices, rows, strict=True):
        # A name may hold what would be taken for markup, so every text is made plain.
        label, name, memory, use, *rest = map(Text, row.values())
        chart = [] if history is None else [_sparkline(history.get(device.id, ()), bar_width, out)]
        cells = [label, name, _bar(device, bar_width, out), memory, use, *chart, *rest]
        table.add_row(*cells, style="" if device.healthy else "red")
    return table


def _texts(device: Device, devices: Sequence[Device], out: Console) -> dict[str, str]:
    name = ("  " if device.parent else "") + (device.name or device.id)
    return {
        "#": device_label(device, devices),
        "device": name if device.healthy else f"unhealthy: {name}",
        "memory": memory_text(device.memory_used_mb, device.memory_total_mb),
        "use": _figure(device.utilization_percent, "%"),
        "power": power_text(device),
        "temp": _figure(device.temperature_c, "°C" if _is_unicode(out) else "C"),
        "procs": UNKNOWN if device.processes is None else str(len(device.processes)),
    }


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


def _figure(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _is_unicode(out: Console) -> bool:
    return out.encoding.lower().startswith("utf")
