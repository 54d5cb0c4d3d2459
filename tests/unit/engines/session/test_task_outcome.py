"""The result of a task."""

import pytest

from gpuyard.engines.session.task_files import Conclusion, conclude

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
def test_a_program_that_went_on_after_its_marker_is_completed_and_flagged(status: int) -> None:
    end = ended(status, has_marker=True, overstayed=True)
    assert end == Conclusion("completed", 0, "ended by gpuyard: it went on after its marker")


def test_without_a_marker_status_0_is_completed_and_gpuyard_writes_the_marker() -> None:
    end = ended(0)
    assert (end.result, end.status, end.writes_marker) == ("completed", 0, True)


@pytest.mark.parametrize("status", [1, 127, SIGKILL])
def test_without_a_marker_any_other_status_is_a_failure_with_that_status(status: int) -> None:
    assert ended(status) == Conclusion("failed", status)


@pytest.mark.parametrize(("status", "reported"), [(0, SIGTERM), (3, 3), (SIGTERM, SIGTERM), (SIGKILL, SIGKILL)])
def test_a_stopped_task_is_not_completed_even_if_it_exits_with_status_0(status: int, reported: int) -> None:
    assert ended(status, was_stopped=True) == Conclusion("stopped", reported)


@pytest.mark.parametrize(("status", "reported"), [(0, SIGHUP), (SIGHUP, SIGHUP), (SIGKILL, SIGKILL)])
def test_a_task_with_a_closed_session_has_failed(status: int, reported: int) -> None:
    assert ended(status, was_closed=True) == Conclusion("failed", reported, "its session was closed")
