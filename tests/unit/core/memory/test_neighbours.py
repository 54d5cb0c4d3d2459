"""How much other work was beside an attempt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.memory.neighbours import Neighbours, assumed_load, note_neighbours


def after(*samples: tuple[float, float, float]) -> Neighbours:
    found = None
    for at_s, percent, jobs in samples:
        found = note_neighbours(found, at_s, percent, jobs)
    assert found is not None
    return found


def test_each_interval_counts_by_its_length_with_the_figures_of_its_start() -> None:
    # Alone for 90 s, then 10 s beside a job that a sample saw one second late.
    found = after((0.0, 0.0, 0.0), (90.0, 80.0, 1.0), (100.0, 80.0, 1.0))
    assert (found.percent, found.jobs) == pytest.approx((8.0, 0.1))


def test_many_samples_at_the_start_count_no_more_than_their_time() -> None:
    often = [(0.05 * number, 300.0, 6.0) for number in range(21)]  # twenty a second
    found = after(*often, (1.0, 0.0, 0.0), (10.0, 0.0, 0.0))
    assert found.percent == pytest.approx(after((0.0, 300.0, 6.0), (1.0, 0.0, 0.0), (10.0, 0.0, 0.0)).percent, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e3), st.floats(0.0, 50.0)), min_size=1, max_size=30))
def test_the_mean_lies_between_what_was_seen(samples: list[tuple[float, float, float]]) -> None:
    found = after(*samples)
    assert -1e-6 <= found.percent <= max(percent for _, percent, _ in samples) + 1e-6
    assert -1e-6 <= found.jobs <= max(jobs for _, _, jobs in samples) + 1e-6


def test_the_idle_start_of_a_new_program_says_little_about_its_load() -> None:
    assert assumed_load(None, None, 0.0) == 50.0
    assert assumed_load(None, 0.0, 2.0) > 40.0, "imports"
    assert assumed_load(None, 95.0, 600.0) == pytest.approx(95.0, abs=2.0)
    assert assumed_load(20.0, 95.0, 600.0) == 20.0
