"""Memory over time as a few rows of block characters.

All pure. Each column shows the maximum of its interval; an interval without a measurement repeats the value before it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:#"


def draw(points: "Sequence[Sequence[float]]", seconds: float, width: int, rows: int, *, is_unicode: bool) -> list[str]:
    """Return `rows` lines of `width` characters, the top one first. `points` are pairs of seconds and MB."""
    levels = _BLOCKS if is_unicode else _PLAIN
    steps = len(levels) - 1
    columns = _columns(points, max(seconds, points[-1][0]), width)
    most = max(columns) or 1.0
    # A value above zero is always visible.
    heights = [max(1, round(value / most * rows * steps)) if value else 0 for value in columns]
    return [
        "".join(levels[min(steps, max(0, height - row * steps))] for height in heights) for row in reversed(range(rows))
    ]


def _columns(points: "Sequence[Sequence[float]]", seconds: float, width: int) -> list[float]:
    intervals: list[list[float]] = [[] for _ in range(width)]
    for at, used in points:
        intervals[min(width - 1, int(at / seconds * width)) if seconds else 0].append(used)
    columns, before = [], 0.0
    for values in intervals:
        columns.append(max(values, default=before))
        before = values[-1] if values else before
    return columns
