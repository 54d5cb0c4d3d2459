"""Devices as lines: a memory bar and charts of the last minutes; a second line with figures if the window is high
enough. All pure."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.text import Text

from gpuyard.model.units import format_gigabytes
from gpuyard.ui.cli.text_table import cell_width, clean, cut
from gpuyard.ui.views import sparkline
from gpuyard.ui.views.machine_tables import figure_text, memory_text, power_text

Device = Mapping[str, Any]
Memory = Mapping[str, float]
# Each block of a chart covers a fixed interval, so that it keeps its height while it moves left.
COLUMN_S = 5.0
_KEPT = 240
BETWEEN = 3
_USE, _POWER = 4, 9
_STYLES = {"own": "green", "kept": "green", "others": "cyan", "foreign": "magenta", "free": "dim"}
_BLOCKS = {"own": "█", "kept": "▄", "others": "▒", "foreign": "×", "free": "·"}  # noqa: RUF001 - it is a sign
_WORDS = {"own": "own", "kept": "reserved", "others": "others", "foreign": "foreign", "free": "free"}


class SparklineSeries:
    """The maximum of a value in each of the last 240 intervals of `COLUMN_S` seconds."""

    def __init__(self) -> None:
        self._columns: dict[int, float] = {}

    def note(self, at: float, value: float | None) -> None:
        if value is not None:
            column = int(at // COLUMN_S)
            self._columns[column] = max(value, self._columns.get(column, value))
            if len(self._columns) > _KEPT:
                del self._columns[min(self._columns)]

    def last(self, count: int, now: float) -> list[float | None]:
        """Return the last `count` intervals; None for one without a value."""
        end = int(now // COLUMN_S)
        return [self._columns.get(column) for column in range(end - count + 1, end + 1)]


class DevicePast:
    def __init__(self) -> None:
        self.use, self.power = SparklineSeries(), SparklineSeries()


class DeviceLayout:
    """Column widths, the same for all devices so that bars can be compared; 0 for a column that does not fit. `each` is
    the number of lines per device; `now` is the daemon's time."""

    def __init__(self, devices: Sequence[Device], width: int, each: int, now: float) -> None:
        self.width, self.each, self.now = width, each, now
        self.labels = {device["id"]: device["label"] or "?" for device in devices}
        self.label = max(map(len, self.labels.values()), default=1)
        longest = max((cell_width(_name(device)) for device in devices), default=0)
        self.name = min(longest, max(8, width // 5))
        self.memory = max((len(_memory(device)) for device in devices), default=0)
        self.spark = max(6, min(60, width // 8))
        self.power = _POWER + 1 + self.spark if each == 1 and width >= 120 else 0
        parts = (self.label, self.name, self.memory, _USE, self.spark, self.power)
        taken = sum(part + 1 for part in parts if part)
        if width - taken < 8:  # the bar
            taken, self.spark = taken - self.spark - 1, 0
        self.bar = max(0, width - taken)


def device_lines(device: Device, past: DevicePast, frame: DeviceLayout) -> list[Text]:
    line = Text.assemble((frame.labels[device["id"]].rjust(frame.label), "bold"), " ")
    if not device.get("healthy", True):
        fault = clean(f"{_name(device)}: unhealthy: {device.get('fault') or 'no answer'}")
        line.append(cut(fault, frame.width - line.cell_len), "red")
        return [line, Text()][: frame.each]
    name = Text(cut(_name(device), frame.name))
    line.append_text(_padded(name, frame.name)).append(" ")
    memory = memory_of(device)
    bar = Text("memory unknown"[: frame.bar]) if memory is None else draw(memory, frame.bar)
    line.append_text(_padded(bar, frame.bar))
    line.append(f" {_memory(device):>{frame.memory}}")
    line.append(f" {figure_text(device.get('utilization_percent'), '%'):>{_USE}}")
    if frame.spark:
        line.append(f" {sparkline(past.use.last(frame.spark, frame.now), 100.0)}", "cyan")
    if frame.power:
        line.append(" ").append_text(_power(device, past, frame))
    if frame.each == 1:
        return [line]
    heat = device.get("temperature_c")
    right = Text("" if heat is None else f"{figure_text(heat, '°C')} ").append_text(_power(device, past, frame))
    second = Text(" " * (frame.label + 1))
    left = frame.width - second.cell_len - right.cell_len - 1
    second.append_text(Text() if memory is None else figures(memory, left))
    return [line, _padded(second, frame.width - right.cell_len).append_text(right)]


def _padded(text: Text, width: int) -> Text:
    text.pad_right(max(0, width - text.cell_len))
    return text


def _power(device: Device, past: DevicePast, frame: DeviceLayout) -> Text:
    draw_w, limit_w = device.get("power_draw_w"), device.get("power_limit_w")
    is_known = draw_w is not None or limit_w is not None
    text = Text((power_text(draw_w, limit_w) if is_known else "").rjust(_POWER))
    if frame.spark:
        values = past.power.last(frame.spark, frame.now)
        most = limit_w or max((value for value in values if value is not None), default=1.0)
        text.append(f" {sparkline(values, most)}", "yellow")
    return text


def _memory(device: Device) -> str:
    return memory_text(*(device.get(f"memory_{name}_mb") for name in ("used", "total", "used_at_least")))


def _name(device: Device) -> str:
    is_faulty = any(issue["severity"] == "fault" for issue in device.get("issues", ()))
    state = "drained: " if device.get("drain") else "banned: " if device.get("banned") else ""
    state = "faulty: " if is_faulty else state
    return clean(f"{state}{device.get('name') or device['id']}")


def beside(lines: Sequence[Text], columns: int, each: int, width: int) -> list[Text]:
    if columns == 1:
        return list(lines)
    half = (len(lines) // each + 1) // 2 * each
    rows = []
    for one, other in zip_longest(lines[:half], lines[half:], fillvalue=Text()):
        line = one.copy()
        line.pad_right(max(0, width - line.cell_len) + BETWEEN)
        rows.append(line.append_text(other))
    return rows


def memory_of(device: Device) -> Memory | None:
    """Return the parts of a device's memory in MB, in the order of the bar; None if it is unknown. `kept` is reserved
    for jobs of this queue, and not in use yet."""
    memory = device["memory"]
    if not memory["capacity_mb"]:
        return None
    own = min(memory["own_mb"], memory["own_used_mb"] or 0.0)
    rest = {name: memory[f"{name}_mb"] for name in ("others", "foreign", "free")}
    return {"own": own, "kept": memory["own_mb"] - own, **rest}


def split(parts: Sequence[float], width: int) -> list[int]:
    """Share exactly `width` characters among the parts; each one above zero gets one, as long as there are enough."""
    shown = sorted((at for at, part in enumerate(parts) if part > 0), key=lambda at: -parts[at])[: max(0, width)]
    widths, whole = [0] * len(parts), sum(parts[at] for at in shown)
    shares = {at: parts[at] / whole * width for at in shown}
    for at in shown:
        widths[at] = max(1, int(shares[at]))
    for _ in range(width - sum(widths) if shown else 0):
        widths[max(shown, key=lambda at: shares[at] - widths[at])] += 1
    for _ in range(sum(widths) - width):
        widths[max((at for at in shown if widths[at] > 1), key=lambda at: widths[at] - shares[at])] -= 1
    return widths


def draw(memory: Memory, width: int) -> Text:
    bar = Text()
    for name, count in zip(memory, split(list(memory.values()), width), strict=True):
        bar.append(_BLOCKS[name] * count, _STYLES[name])
    return bar


def legend() -> Text:
    text = Text()
    for name, word in _WORDS.items():
        text.append(_BLOCKS[name], _STYLES[name]).append(f" {word}  ")
    text.rstrip()
    return text


def figures(memory: Memory, width: int) -> Text:
    sizes = [(name, format_gigabytes(size)) for name, size in memory.items() if size > 0]
    by_word = Text("  ").join(Text.assemble((_WORDS[name], _STYLES[name]), f" {size}") for name, size in sizes)
    by_glyph = Text(" ").join(Text.assemble((_BLOCKS[name], _STYLES[name]), size) for name, size in sizes)
    text = by_word if by_word.cell_len + 3 <= width else by_glyph
    return text.append(" GB")
