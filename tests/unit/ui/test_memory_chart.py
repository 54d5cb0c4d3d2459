"""Memory over time as a chart of block characters."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.ui.cli.jobs.show import draw
from gpuyard.ui.cli.text_table import spell


def picture(points: list[tuple[float, float]], seconds: float, width: int, rows: int = 1) -> list[str]:
    return draw(points, seconds, width, rows)


def test_each_column_shows_its_maximum_or_the_last_sample() -> None:
    assert picture([(0, 1), (1, 2), (2, 8), (2.5, 4), (3, 4)], 4, 4) == ["▁▂█▄"]
    assert picture([(0, 8), (0.5, 4), (6, 8)], 8, 8) == ["█▄▄▄▄▄██"]
    assert picture([(2, 5), (3, 5)], 4, 4) == ["  ██"]
    assert picture([(0, 4), (1, 6), (2, 8)], 3, 3, rows=2) == [" ▄█", "███"]
    assert spell(draw([(0, 1), (1, 2), (2, 3)], 3, 3, 1)[0], "ascii") == "-+#"


POINTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=130).map(sorted)


@given(points=POINTS, seconds=st.floats(0, 1e6), width=st.integers(1, 200), rows=st.integers(1, 5))
def test_the_chart_has_the_given_size(points: list[tuple[float, float]], seconds: float, width: int, rows: int) -> None:
    lines = picture(points, seconds, width, rows)
    assert [len(line) for line in lines] == [width] * rows
    assert ("█" in lines[0]) == any(used for _, used in points)
