"""The memory of a device as a bar: used and reserved by this queue, other leases, foreign processes, free.

All pure. Each part that is not zero has at least one character, and the characters fill the bar exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from rich.text import Text

from gpuyard.core.units import format_gigabytes
from gpuyard.ui.tui.glyphs import Glyphs

STYLES = {"own": "green", "kept": "green", "others": "cyan", "foreign": "magenta", "free": "dim"}
WORDS = {"own": "own", "kept": "reserved", "others": "others", "foreign": "foreign", "free": "free"}


class BarParts(Struct, frozen=True, kw_only=True):
    """In MB; `kept` is reserved for jobs of this queue, and not in use yet."""

    own: float = 0.0
    kept: float = 0.0
    others: float = 0.0
    foreign: float = 0.0
    free: float = 0.0

    def parts(self) -> list[tuple[str, float]]:
        return [(name, getattr(self, name)) for name in WORDS]


def memory_of(device: Mapping[str, Any]) -> BarParts | None:
    """Return the parts of a device of the daemon's answer; None if its memory is unknown."""
    memory = device.get("memory") or {}
    if memory.get("capacity_mb"):
        charged = memory.get("own_mb") or 0.0
        own = min(charged, memory.get("own_used_mb") or 0.0)
        rest = {name: memory.get(f"{name}_mb") or 0.0 for name in ("others", "foreign", "free")}
        return BarParts(own=own, kept=charged - own, **rest)
    used, total = device.get("memory_used_mb"), device.get("memory_total_mb")
    return None if used is None or not total else BarParts(foreign=used, free=max(0.0, total - used))


def split(parts: Sequence[float], width: int) -> list[int]:
    """Share `width` characters among the parts; each part above zero gets one, as long as there are enough."""
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


def draw(memory: BarParts, width: int, glyphs: Glyphs) -> Text:
    bar = Text()
    parts = memory.parts()
    for (name, _), count in zip(parts, split([size for _, size in parts], width), strict=True):
        bar.append(getattr(glyphs, name) * count, STYLES[name])
    return bar


def legend(glyphs: Glyphs) -> Text:
    text = Text()
    for name, word in WORDS.items():
        text.append(getattr(glyphs, name), STYLES[name]).append(f" {word}  ")
    text.rstrip()
    return text


def figures(memory: BarParts, width: int, glyphs: Glyphs) -> Text:
    """Return each part above zero in GB, with its name, or with its character if names do not fit."""
    sizes = [(name, format_gigabytes(size)) for name, size in memory.parts() if size > 0]
    by_word = Text("  ").join(Text.assemble((WORDS[name], STYLES[name]), f" {size}") for name, size in sizes)
    by_glyph = Text(" ").join(Text.assemble((getattr(glyphs, name), STYLES[name]), size) for name, size in sizes)
    text = by_word if by_word.cell_len + 3 <= width else by_glyph
    return text.append(" GB")
