"""Views that commands share: devices, leases, batches, renders, reports, workspaces."""

import sys

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
