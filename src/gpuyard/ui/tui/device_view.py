"""Devices as lines: one each, and a second with figures if the window is high enough. All pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from rich.text import Text

from gpuyard.ui.cli.text_table import cell_width, clean, cut
from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.memory_bar import draw, figures, memory_of
from gpuyard.ui.tui.sparkline import SparklineSeries, sparkline
from gpuyard.ui.views.device_tables import figure_text, memory_text, power_text

Device = Mapping[str, Any]
_BETWEEN = 3
_LEAST_BAR = 8
_USE, _POWER = 4, 9


class DevicePast(Struct):
    """Recent values of a device."""

    use: SparklineSeries
    power: SparklineSeries


class DeviceLayout(Struct, frozen=True, kw_only=True):
    """Column widths, the same for all devices so that bars can be compared; 0 for a column that does not fit.

    `each` is the number of lines per device; `now` is the daemon's time.
    """

    width: int
    each: int
    label: int
    name: int
    bar: int
    memory: int
    spark: int
    power: int
    glyphs: Glyphs
    now: float


def fit(devices: Sequence[Device], width: int, each: int, glyphs: Glyphs, now: float) -> DeviceLayout:
    label = max((len(label_of(device, devices)) for device in devices), default=1)
    longest = max((cell_width(_name(device)) for device in devices), default=0)
    name = min(longest, max(8, width // 5))
    memory = max((len(_memory(device)) for device in devices), default=0)
    spark = max(6, min(60, width // 8))
    power = _POWER + 1 + spark if each == 1 and width >= 120 else 0
    taken = sum(part + 1 for part in (label, name, memory, _USE, spark, power) if part)
    if width - taken < _LEAST_BAR:
        taken, spark = taken - spark - 1, 0
    bar = max(0, width - taken)
    return DeviceLayout(
        width=width, each=each, label=label, name=name, bar=bar, memory=memory, spark=spark, power=power,
        glyphs=glyphs, now=now,
    )  # fmt: skip


def device_lines(device: Device, label: str, past: DevicePast, frame: DeviceLayout) -> list[Text]:
    line = Text.assemble((label.rjust(frame.label), "bold"), " ")
    if not device.get("healthy", True):
        fault = clean(f"{_name(device)}: unhealthy: {device.get('fault') or 'no answer'}")
        line.append(cut(fault, frame.width - line.cell_len, frame.glyphs.ellipsis), "red")
        return [line, Text()][: frame.each]
    name = Text(cut(_name(device), frame.name, frame.glyphs.ellipsis))
    line.append_text(_padded(name, frame.name)).append(" ")
    line.append_text(_padded(_bar(device, frame), frame.bar))
    line.append(f" {_memory(device):>{frame.memory}}")
    line.append(f" {figure_text(device.get('utilization_percent'), '%'):>{_USE}}")
    if frame.spark:
        line.append(f" {sparkline(past.use.last(frame.spark, frame.now), 100.0, frame.glyphs)}", "cyan")
    if frame.power:
        line.append(" ").append_text(_power(device, past, frame))
    return [line] if frame.each == 1 else [line, _second(device, past, frame)]


def _bar(device: Device, frame: DeviceLayout) -> Text:
    memory = memory_of(device)
    return Text("memory unknown"[: frame.bar]) if memory is None else draw(memory, frame.bar, frame.glyphs)


def _padded(text: Text, width: int) -> Text:
    text.pad_right(max(0, width - text.cell_len))
    return text


def _second(device: Device, past: DevicePast, frame: DeviceLayout) -> Text:
    """Return the second line: memory in figures, temperature and power."""
    heat, memory = device.get("temperature_c"), memory_of(device)
    right = Text("" if heat is None else f"{figure_text(heat, frame.glyphs.degree)} ")
    right.append_text(_power(device, past, frame))
    line = Text(" " * (frame.label + 1))
    left = frame.width - line.cell_len - right.cell_len - 1
    line.append_text(Text() if memory is None else figures(memory, left, frame.glyphs))
    return _padded(line, frame.width - right.cell_len).append_text(right)


def _power(device: Device, past: DevicePast, frame: DeviceLayout) -> Text:
    draw_w, limit_w = device.get("power_draw_w"), device.get("power_limit_w")
    is_known = draw_w is not None or limit_w is not None
    text = Text((power_text(draw_w, limit_w) if is_known else "").rjust(_POWER))
    if frame.spark:
        values = past.power.last(frame.spark, frame.now)
        most = limit_w or max((value for value in values if value is not None), default=1.0)
        text.append(f" {sparkline(values, most, frame.glyphs)}", "yellow")
    return text


def label_of(device: Device, devices: Sequence[Device]) -> str:
    """Return `0`; `0:1` for a part of card 0; `amd:0` if the machine has GPUs of several vendors."""
    parent = next((other for other in devices if other["id"] == device.get("parent")), None)
    numbers = [other.get("index") for other in (parent, device) if other is not None]
    label = ":".join("?" if number is None else str(number) for number in numbers)
    return f"{device.get('vendor')}:{label}" if len({other.get("vendor") for other in devices}) > 1 else label


def _memory(device: Device) -> str:
    return memory_text(device.get("memory_used_mb"), device.get("memory_total_mb"))


def _name(device: Device) -> str:
    return clean(str(device.get("name") or device["id"]))


def beside(lines: Sequence[Text], columns: int, each: int, width: int) -> list[Text]:
    """Arrange the lines of devices in one or two columns, the first column first."""
    if columns == 1:
        return list(lines)
    devices = [lines[at : at + each] for at in range(0, len(lines), each)]
    half = (len(devices) + 1) // 2
    rows = []
    for place in range(half):
        right = devices[half + place] if half + place < len(devices) else [Text()] * each
        for one, other in zip(devices[place], right, strict=True):
            line = one.copy()
            line.pad_right(max(0, width - line.cell_len) + _BETWEEN)
            rows.append(line.append_text(other))
    return rows


def column_width(width: int, columns: int) -> int:
    return (width - _BETWEEN * (columns - 1)) // columns
