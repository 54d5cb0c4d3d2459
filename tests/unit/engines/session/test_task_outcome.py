"""What a task's end amounts to."""

import pytest

from gpuyard.engines.session.task_outcome import Conclusion, conclude

SIGTERM, SIGHUP, SIGKILL = 143, 129, 137


def ended(status: int, **facts: bool) -> Conclusion:
    known = {"has_marker": False, "overstayed": False, "was_stopped": False, "was_closed": False}
    return conclude(status, **{**known, **facts})


@pytest.mark.parametrize("facts", [{}, {"was_stopped": True}, {"was_closed": True}])
@pytest.mark.parametrize("status", [0, 1, SIGTERM, SIGHUP])
def test_a_marker_means_completed_however_the_program_ended(status: int, facts: dict[str, bool]) -> None:
    end = ended(status, has_marker=True, **facts)
    assert (end.result, end.status, end.writes_marker) == ("completed", 0, False)


def test_a_status_after_the_marker_is_flagged() -> None:
    assert ended(0, has_marker=True).note is None
    assert ended(7, has_marker=True).note == "it ended with status 7 after its marker"


@pytest.mark.parametrize("status", [0, SIGTERM, SIGKILL])
def test_one_that_went_on_after_its_marker_is_completed_and_flagged(status: int) -> None:
    end = ended(status, has_marker=True, overstayed=True)
    assert end == Conclusion("completed", 0, "ended by gpuyard: it went on after its marker")


def test_without_a_marker_status_0_is_completed_and_the_marker_is_written_for_it() -> None:
    end = ended(0)
    assert (end.result, end.status, end.writes_marker) == ("completed", 0, True)


@pytest.mark.parametrize("status", [1, 127, SIGKILL])
def test_without_a_marker_any_other_status_is_a_failure_that_the_queue_is_told(status: int) -> None:
    assert ended(status) == Conclusion("failed", status)


@pytest.mark.parametrize(("status", "told"), [(0, SIGTERM), (3, 3), (SIGTERM, SIGTERM), (SIGKILL, SIGKILL)])
def test_one_that_was_told_to_stop_is_not_completed_even_if_it_ends_without_complaint(status: int, told: int) -> None:
    assert ended(status, was_stopped=True) == Conclusion("stopped", told)


@pytest.mark.parametrize(("status", "told"), [(0, SIGHUP), (SIGHUP, SIGHUP), (SIGKILL, SIGKILL)])
def test_one_whose_session_was_closed_has_failed(status: int, told: int) -> None:
    assert ended(status, was_closed=True) == Conclusion("failed", told, "its session was closed")
