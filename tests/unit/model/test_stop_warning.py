import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job import Attempt, OutcomeKind, Started
from gpuyard.model.job_spec import JobSpec, StopWarning
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.stopping import check_lead, parse_warning, signal_name, stop_times, warn_at, warning_text


@pytest.mark.parametrize(
    ("text", "signum", "lead_s"),
    [
        ("USR1@5m", signal.SIGUSR1, 300.0), ("SIGUSR2@90", signal.SIGUSR2, 90.0),
        ("usr1", signal.SIGUSR1, 60.0), (f"{signal.SIGUSR1:d}@30s", signal.SIGUSR1, 30.0),
        ("int@0s", signal.SIGINT, 0.0), ("40@1h", 40, 3600.0),
    ],
)  # fmt: skip
def test_a_signal_comes_a_minute_before_by_default(text: str, signum: int, lead_s: float) -> None:
    assert parse_warning(text) == StopWarning(signum=signum, lead_s=lead_s)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("USR3@5m", "names no signal"), ("0@5m", "names no signal"), ("99", "names no signal"),
        ("@5m", "names no signal"), ("B:USR1@60", "names no signal"),
        ("KILL@5m", "no program can handle this signal"), ("USR1@soon", "'soon' is not a time"),
        ("USR1@1d", "too early"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_warning(text)


@given(st.sampled_from(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})), st.integers(0, 64_800))
def test_what_is_shown_is_read_as_the_same(signum: int, lead_s: int) -> None:
    warning = StopWarning(signum=int(signum), lead_s=float(lead_s))
    assert parse_warning(warning_text(warning)) == warning
    assert not signal_name(signum).startswith("SIG")


def test_a_time_limit_has_to_be_longer_than_the_lead() -> None:
    check_lead(parse_warning("USR1@1m"), None)
    check_lead(parse_warning("USR1@1m"), 61.0)
    with pytest.raises(UserError, match="1m before the end, and --time-limit is not longer") as refused:
        check_lead(parse_warning("USR1@1m"), 60.0)
    assert refused.value.hint == "give a shorter time, such as --signal USR1@6s"


SPEC = JobSpec(command=("x",), cwd="/", environment={}, need=Need(), warning=StopWarning(signum=10, lead_s=60.0))
RUNNING = Attempt(job_id=1, number=1, phase=Started(at=1000.0, keeper_pid=9), stop_at=2000.0)


@pytest.mark.parametrize("state", [JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING])
def test_a_warning_is_due_before_the_time_limit_and_not_while_that_pauses(state: JobState) -> None:
    assert warn_at(SPEC, JobState.RUNNING, RUNNING) == 1940.0
    assert warn_at(SPEC, state, RUNNING) is None


def test_a_preempted_job_has_the_time_of_its_warning_once() -> None:
    assert stop_times(SPEC, RUNNING, OutcomeKind.PREEMPTED, 1500.0).stop_at == 1560.0
    was_warned = replace(RUNNING, warned_at=1940.0)
    assert stop_times(SPEC, was_warned, OutcomeKind.PREEMPTED, 1970.0).stop_at == 2000.0
    assert stop_times(SPEC, was_warned, OutcomeKind.PREEMPTED, 2010.0).stop_at == 2010.0
