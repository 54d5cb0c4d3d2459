"""Views that commands share: devices, leases, batches, renders, reports, workspaces."""

import sys
from collections.abc import Iterable

from msgspec import Struct


class Frame(Struct, frozen=True, kw_only=True):
    """Where lines are shown: `width` and `height` in characters, None without a limit; symbols are for terminals."""

    width: int | None = None
    height: int | None = None
    has_symbols: bool = True

    @property
    def columns(self) -> int:
        return sys.maxsize if self.width is None else self.width


def bar(share: float, width: int) -> tuple[str, str]:
    """Return the full and the empty part of a bar. It is empty or full only if the share is 0 or 1."""
    share = min(1.0, max(0.0, share))
    filled = min(width - (share < 1), max(share > 0, round(share * width)))
    return "█" * filled, "░" * (width - filled)


def sparkline(values: Iterable[float | None], most: float) -> str:
    """Return a character for each value; blank for None."""
    blocks = "▁▂▃▄▅▆▇█"
    steps = len(blocks) - 1
    return "".join(
        " " if value is None else blocks[max(0, min(steps, round(value / (most or 1.0) * steps)))] for value in values
    )
