"""Views that commands share: devices, leases, batches, renders, reports, workspaces."""

import sys

from msgspec import Struct


class Frame(Struct, frozen=True, kw_only=True):
    """Where lines are shown: `width` and `height` in characters, None without a limit; symbols are for terminals."""

    width: int | None = None
    height: int | None = None
    is_unicode: bool = True
    has_symbols: bool = True

    @property
    def columns(self) -> int:
        return sys.maxsize if self.width is None else self.width

    @property
    def ellipsis(self) -> str:
        return "…" if self.is_unicode else "~"
