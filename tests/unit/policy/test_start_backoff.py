"""How starts go on after a limit of the system has kept a program from starting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.disk_and_system_limits import ResourceLimit, StartBackoff
from gpuyard.policy.numbers import FIRST_DELAY_S, LONGEST_DELAY_S

LIMIT = ResourceLimit(text="no program can be started", remedy="end some")
OWN = ResourceLimit(text="its program cannot be read", is_own=True)


def failed(times: int, now: float = 0.0) -> tuple[StartBackoff, float]:
    """Return the state after this many failures of different jobs, each tried as early as possible, and the time."""
    backoff = StartBackoff()
    for number in range(times):
        now = max(now, backoff.retry_at)
        if number:
            assert backoff.most_starts(now) == 1
            backoff = backoff.after_start(now)
        backoff = backoff.after_failure(LIMIT, number, now)
    return backoff, now


def test_starts_stop_for_a_delay_that_doubles() -> None:
    assert StartBackoff().most_starts(0.0) is None
    assert StartBackoff().after_start(5.0) == StartBackoff(), "without a limit any number may start"
    # After a failure nothing starts for a second and then one job.
    backoff = StartBackoff().after_failure(LIMIT, 1, 100.0)
    assert [backoff.most_starts(now) for now in (100.0, 100.9, 101.0, 500.0)] == [0, 0, 1, 1]
    delays = [backoff.retry_at - now for backoff, now in map(failed, range(1, 9))]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], "the delay doubles up to 30 seconds"
    # Further failures of the same batch make the delay no longer.
    backoff = StartBackoff()
    for job_id in range(200):
        backoff = backoff.after_failure(LIMIT, job_id, 100.0 + job_id / 1000)
    assert (backoff.delay_s, backoff.retry_at) == (1.0, 101.0)


def test_a_tried_job_ends_or_keeps_the_limit() -> None:
    backoff, now = failed(3)
    tried_at = backoff.retry_at
    backoff = backoff.after_start(tried_at)
    assert backoff.most_starts(tried_at) == 0
    assert backoff.at(tried_at + 0.5) is backoff
    assert backoff.at(tried_at + 1.0) == StartBackoff()
    assert now < tried_at, "a job that is tried and not reported back ends the limit"
    backoff, _ = failed(2)
    tried_at = backoff.retry_at
    backoff = backoff.after_start(tried_at).after_failure(LIMIT, 9, tried_at + 0.1)
    assert backoff.at(tried_at + 1.0).most_starts(tried_at + 1.0) == 0
    assert backoff.delay_s == 4.0, "a job that is tried and fails keeps the limit"


def test_a_job_is_set_aside_after_three_failures_in_a_row_or_at_once_for_its_own_files() -> None:
    backoff, now = StartBackoff(), 0.0
    for number in range(3):
        backoff = backoff.after_failure(LIMIT, 7, now)
        assert backoff.is_set_aside(LIMIT, 7) == (number == 2)
        now = backoff.retry_at
    assert not backoff.is_set_aside(LIMIT, 8)
    assert StartBackoff().is_set_aside(OWN, 8)


@given(st.lists(st.tuples(st.sampled_from(["fail", "start", "wait"]), st.floats(0.0, 40.0)), max_size=40))
def test_whatever_happens_a_job_is_tried_within_31_seconds(happened: list[tuple[str, float]]) -> None:
    backoff, now = StartBackoff(), 0.0
    for what, passed_s in happened:
        now += passed_s
        backoff = backoff.at(now)
        if what == "fail":
            backoff = backoff.after_failure(LIMIT, 1, now)
        elif what == "start" and backoff.most_starts(now) != 0:
            backoff = backoff.after_start(now)
        later = now + LONGEST_DELAY_S + FIRST_DELAY_S
        assert backoff.at(later).most_starts(later) != 0
        assert backoff.delay_s <= LONGEST_DELAY_S


@pytest.mark.parametrize("most", [0, 1, 5])
def test_most_starts_is_never_more_than_one_during_a_limit(most: int) -> None:
    backoff, _ = failed(most + 1)
    assert {backoff.most_starts(now) for now in (0.0, 1e9)} <= {0, 1}
