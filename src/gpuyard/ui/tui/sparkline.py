"""The last minutes of a value as a row of blocks.

Each block covers a fixed interval, so that a block keeps its height while it moves left.
"""

from collections import deque
from collections.abc import Iterable

from gpuyard.ui.tui.glyphs import Glyphs

COLUMN_S = 5.0
_KEPT = 240


class SparklineSeries:
    """The maximum of a value in each interval of `COLUMN_S` seconds."""

    def __init__(self) -> None:
        self._columns: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def note(self, at: float, value: float | None) -> None:
        if value is None:
            return
        column = int(at // COLUMN_S)
        if self._columns and self._columns[-1][0] >= column:
            last, before = self._columns[-1]
            self._columns[-1] = (last, max(value, before) if last == column else before)
        else:
            self._columns.append((column, value))

    def note_all(self, points: Iterable[tuple[float, float | None]]) -> None:
        """Insert older points before the known ones."""
        later = list(self._columns)
        self._columns.clear()
        for at, value in points:
            self.note(at, value)
        for column, value in later:
            self.note(column * COLUMN_S, value)

    def last(self, count: int, now: float) -> list[float | None]:
        """Return the last `count` intervals; None for one without a value."""
        end = int(now // COLUMN_S)
        known = dict(self._columns)
        return [known.get(column) for column in range(end - count + 1, end + 1)]


def sparkline(values: Iterable[float | None], most: float, glyphs: Glyphs) -> str:
    """Return a character per value; unknown is blank, `most` is the highest block."""
    steps = len(glyphs.levels) - 1
    return "".join(
        " " if value is None else glyphs.levels[max(0, min(steps, round(value / (most or 1.0) * steps)))]
        for value in values
    )
