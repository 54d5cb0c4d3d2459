"""The visible rows of a queue of any length, and the selected one. All pure.

Rows are requested in pages of about three windows, so that the next rows are loaded before they are scrolled to.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

Row = Mapping[str, Any]


class Page(Struct, frozen=True, kw_only=True):
    """Rows of the queue from `after` on; `total` is the number of all rows, as far as known."""

    after: int = 0
    rows: tuple[Row, ...] = ()
    total: int = 0

    def row(self, at: int) -> Row | None:
        place = at - self.after
        return self.rows[place] if 0 <= place < len(self.rows) else None

    def find(self, job_id: int) -> int | None:
        return next((self.after + place for place, row in enumerate(self.rows) if row["id"] == job_id), None)


class RowWindow(Struct, frozen=True, kw_only=True):
    """`top` is the first visible row, `at` the selected one, `height` the number of visible rows.

    A job that the user selected stays selected when it moves; before that, the first row is selected.
    """

    top: int = 0
    at: int = 0
    height: int = 1
    job_id: int | None = None
    is_followed: bool = False


def page_of(answer: Mapping[str, Any], after: int) -> Page:
    rows: Sequence[Row] = answer["jobs"]
    counted = answer.get("total")
    seen = after + len(rows) + (1 if answer.get("next") is not None else 0)
    return Page(after=after, rows=tuple(rows), total=seen if counted is None else max(counted, after + len(rows)))


def wanted(window: RowWindow, now: tuple[int, int]) -> tuple[int, int]:
    """Return start and length of the page to request; the current ones if they still cover the window."""
    after, limit = now
    if after <= window.top and window.top + window.height <= after + limit <= after + 6 * window.height:
        return now
    return max(0, window.top - window.height), 3 * window.height


def move(window: RowWindow, by: int, page: Page) -> RowWindow:
    return choose(window, max(0, min(page.total - 1, window.at + by)), page)


def choose(window: RowWindow, at: int, page: Page) -> RowWindow:
    return _select(replace(window, is_followed=at > 0), at, page)


def settle(window: RowWindow, page: Page) -> RowWindow:
    found = page.find(window.job_id) if window.is_followed and window.job_id is not None else None
    at = window.at if found is None else found
    return _select(window, max(0, min(at, page.total - 1)), page)


def _select(window: RowWindow, at: int, page: Page) -> RowWindow:
    row = page.row(at)
    lowest = max(0, page.total - window.height)
    top = max(0, min(max(window.top, at - window.height + 1), at, lowest))
    return replace(window, at=at, top=top, job_id=None if row is None else row["id"])
