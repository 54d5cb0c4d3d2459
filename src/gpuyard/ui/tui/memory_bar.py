"""A device's memory as a bar: ours in use, ours reserved, other leases', strangers', and what is free.

All pure. Whatever is not zero has at least one letter, and the letters add up to the bar.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from rich.text import Text

from gpuyard.core.units import format_gigabytes
from gpuyard.ui.tui.glyphs import Glyphs

STYLES = {"own": "green", "kept": "green", "others": "cyan", "foreign": "magenta", "free": "dim"}
WORDS = {"own": "own", "kept": "reserved", "others": "others", "foreign": "foreign", "free": "free"}


class MemoryParts(Struct, frozen=True, kw_only=True):
    """In MB; `kept` is reserved for our jobs, and not in use yet."""

    own: float = 0.0
    kept: float = 0.0
    others: float = 0.0
    foreign: float = 0.0
    free: float = 0.0

    def parts(self) -> list[tuple[str, float]]:
        return [(name, getattr(self, name)) for name in WORDS]


def memory_of(device: Mapping[str, Any]) -> MemoryParts | None:
    """Of a device as the daemon tells of it; None where nothing is known of its memory."""
    told = device.get("memory") or {}
    if told.get("capacity_mb"):
        charged = told.get("own_mb") or 0.0
        own = min(charged, told.get("own_used_mb") or 0.0)
        rest = {name: told.get(f"{name}_mb") or 0.0 for name in ("others", "foreign", "free")}
        return MemoryParts(own=own, kept=charged - own, **rest)
    used, total = device.get("memory_used_mb"), device.get("memory_total_mb")
    return None if used is None or not total else MemoryParts(foreign=used, free=max(0.0, total - used))


def split(parts: Sequence[float], width: int) -> list[int]:
    """How many of `width` letters each part gets; each that is not zero gets one, as far as there are so many."""
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


def draw(memory: MemoryParts, width: int, letters: Glyphs) -> Text:
    bar = Text()
    parts = memory.parts()
    for (name, _), count in zip(parts, split([size for _, size in parts], width), strict=True):
        bar.append(getattr(letters, name) * count, STYLES[name])
    return bar


def legend(letters: Glyphs) -> Text:
    text = Text()
    for name, word in WORDS.items():
        text.append(getattr(letters, name), STYLES[name]).append(f" {word}  ")
    text.rstrip()
    return text


def figures(memory: MemoryParts, room: int, letters: Glyphs) -> Text:
    """Each part that is not zero in GB: by its word, or by its letter where there is no room for words."""
    told = [(name, format_gigabytes(size)) for name, size in memory.parts() if size > 0]
    by_word = Text("  ").join(Text.assemble((WORDS[name], STYLES[name]), f" {size}") for name, size in told)
    by_letter = Text(" ").join(Text.assemble((getattr(letters, name), STYLES[name]), size) for name, size in told)
    text = by_word if by_word.cell_len + 3 <= room else by_letter
    return text.append(" GB")
