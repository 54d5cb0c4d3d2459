"""The last minutes of a figure as a row of blocks.

A block stands for a stretch of time that does not shift as time goes on, so that it is drawn once and then moves.
"""

from collections import deque
from collections.abc import Iterable

from gpuyard.ui.tui.glyphs import Glyphs

COLUMN_S = 5.0
_KEPT = 240


class SparklineSeries:
    """What a figure was, by stretches of `COLUMN_S`: the most in each."""

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
        """Those before what is known already; the newest of what is noted stays the newest."""
        later = list(self._columns)
        self._columns.clear()
        for at, value in points:
            self.note(at, value)
        for column, value in later:
            self.note(column * COLUMN_S, value)

    def last(self, count: int, now: float) -> list[float | None]:
        """Of the last so many stretches; None where nothing is known."""
        end = int(now // COLUMN_S)
        known = dict(self._columns)
        return [known.get(column) for column in range(end - count + 1, end + 1)]


def sparkline(values: Iterable[float | None], most: float, letters: Glyphs) -> str:
    """What is unknown is blank; `most` fills a letter."""
    steps = len(letters.levels) - 1
    return "".join(
        " " if value is None else letters.levels[max(0, min(steps, round(value / (most or 1.0) * steps)))]
        for value in values
    )
