"""Memory over time, drawn in a terminal: a few rows of blocks, with the most it held and how long it ran as labels.

All pure. Each column shows the most of its stretch of time; where nothing was measured in it, what was before.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:#"


def draw(points: "Sequence[Sequence[float]]", seconds: float, width: int, rows: int, *, is_unicode: bool) -> list[str]:
    """Lines of `width`, the top one first. `points` are seconds and MB."""
    levels = _BLOCKS if is_unicode else _PLAIN
    steps = len(levels) - 1
    columns = _columns(points, max(seconds, points[-1][0]), width)
    most = max(columns) or 1.0
    # Whatever is not zero is seen.
    heights = [max(1, round(value / most * rows * steps)) if value else 0 for value in columns]
    return [
        "".join(levels[min(steps, max(0, height - row * steps))] for height in heights) for row in reversed(range(rows))
    ]


def _columns(points: "Sequence[Sequence[float]]", seconds: float, width: int) -> list[float]:
    stretches: list[list[float]] = [[] for _ in range(width)]
    for at, used in points:
        stretches[min(width - 1, int(at / seconds * width)) if seconds else 0].append(used)
    columns, before = [], 0.0
    for stretch in stretches:
        columns.append(max(stretch, default=before))
        before = stretch[-1] if stretch else before
    return columns
