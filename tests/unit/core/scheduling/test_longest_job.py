"""Which job decides when all is over."""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.scheduling.longest_job import FAR_LONGER, LEAST_LEFT_S, RunningWork, WaitingWork, find_longest

DAY = 86_400.0


def work(name: str, likely_s: float | None, ran_s: float = 0.0, devices: int = 1) -> RunningWork:
    return RunningWork(lease_id=name, devices=devices, ran_s=ran_s, likely_s=likely_s)


def waiting(seconds: float, *durations_s: float) -> Callable[[float], WaitingWork]:
    return lambda _: WaitingWork(device_s=seconds, durations_s=durations_s or (60.0,))


def test_a_job_that_outlasts_all_other_work_decides() -> None:
    running = [work("long", 33 * DAY), work("a", 3600.0), work("b", 3600.0)]
    assert find_longest(running, waiting(400 * 3600.0), 4) == {"long": 33 * DAY}
    assert find_longest(running, waiting(33 * 3 * DAY), 4) == {}, "the waiting work takes longer than the job"


def test_a_job_that_is_only_somewhat_longer_than_others_decides_nothing() -> None:
    assert find_longest([work("long", FAR_LONGER * 60.0)], waiting(60.0), 4) == {"long": FAR_LONGER * 60.0}
    assert find_longest([work("long", FAR_LONGER * 59.0)], waiting(60.0), 4) == {}
    assert find_longest([work("long", DAY), *(work(name, DAY / 10) for name in "abc")], waiting(60.0), 4) == {}


def test_where_there_is_no_other_device_no_job_decides() -> None:
    assert find_longest([work("long", 33 * DAY)], waiting(60.0), 1) == {}
    assert find_longest([work("long", 33 * DAY, devices=4)], waiting(60.0), 4) == {}


def test_of_four_long_jobs_on_four_devices_none_decides_while_work_waits() -> None:
    running = [work(name, 30 * DAY) for name in "abcd"]
    assert find_longest(running, waiting(60.0), 4) == {}


def test_a_job_beyond_its_likely_duration_is_expected_to_run_as_long_again() -> None:
    assert work("a", 100.0, ran_s=40.0).left_s == 60.0
    assert work("a", 100.0, ran_s=400.0).left_s == 400.0
    assert work("a", None, ran_s=400.0).left_s == 400.0


def test_waiting_work_is_counted_only_if_a_job_could_decide() -> None:
    def fail(_: float) -> WaitingWork:
        raise AssertionError("the waiting work was counted")

    assert find_longest([work("a", LEAST_LEFT_S - 1.0)], fail, 4) == {}
    assert find_longest([work(name, DAY) for name in "abcdefgh"], fail, 4) == {}


def test_jobs_of_unknown_duration_take_as_long_as_those_that_run() -> None:
    asked: list[float] = []

    def count(unknown_s: float) -> WaitingWork:
        asked.append(unknown_s)
        return WaitingWork()

    find_longest([work("a", 3000.0), work("b", 1000.0)], count, 4)
    assert asked == [2000.0]


@given(
    st.lists(st.tuples(st.floats(0.0, 1e7), st.none() | st.floats(0.0, 1e7), st.integers(1, 4)), max_size=8),
    st.floats(0.0, 1e8),
    st.integers(1, 8),
)
def test_all_other_work_fits_elsewhere_before_the_longest_job_ends(
    running: list[tuple[float, float | None, int]], waiting_s: float, devices: int
) -> None:
    works = [work(str(place), likely, ran, count) for place, (ran, likely, count) in enumerate(running)]
    found = find_longest(works, waiting(waiting_s), devices)
    for name, left_s in found.items():
        own = works[int(name)]
        rest = sum(each.left_s * each.devices for each in works if each is not own) + waiting_s
        assert left_s == own.left_s >= LEAST_LEFT_S
        assert rest < left_s * (devices - own.devices) or math.isclose(rest, left_s * (devices - own.devices))
