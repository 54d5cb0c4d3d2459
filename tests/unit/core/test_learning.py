import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.jobs import JobSpec
from gpuyard.core.learning import Durations, Estimate, estimate, fingerprints, learn
from gpuyard.core.model import Need

SEEN = Durations(count=3, least_s=50.0, mean_s=60.0, most_s=80.0)


def spec(**said: float) -> JobSpec:
    return replace(JobSpec(command=("true",), cwd="/", environment={}, need=Need()), **said)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_what_was_learned_is_the_least_the_mean_and_the_most(runs: list[float]) -> None:
    learned = None
    for seconds in runs:
        learned = learn(learned, seconds)
    assert learned is not None
    assert (learned.count, learned.least_s, learned.most_s) == (len(runs), min(runs), max(runs))
    assert learned.mean_s == pytest.approx(sum(runs) / len(runs), abs=1e-6)


def test_the_exact_command_and_its_program_are_told_apart() -> None:
    exact, program = fingerprints(("python", "train.py", "--lr", "1"))
    other_exact, same_program = fingerprints(("python", "train.py", "--lr", "2"))
    assert exact != other_exact
    assert program == same_program
    assert fingerprints(("python", "-u", "eval.py"))[1] != program
    assert fingerprints(("python", "-u", "train.py"))[1] == program


def test_words_are_not_joined_into_others() -> None:
    assert fingerprints(("echo", "a b"))[0] != fingerprints(("echo", "a", "b"))[0]


def test_a_command_that_is_not_utf_8_has_fingerprints_too() -> None:
    assert fingerprints(("run", "caf\udce9.py"))[1] != fingerprints(("run", "caf\udce8.py"))[1]


def test_of_what_nobody_knows_nothing_is_said() -> None:
    assert estimate(spec(), None) == Estimate()


def test_what_was_seen_is_the_estimate() -> None:
    assert estimate(spec(), SEEN) == Estimate(least_s=50.0, likely_s=60.0, most_s=80.0)


def test_what_the_user_said_goes_before_what_was_seen() -> None:
    assert estimate(spec(duration_s=5.0), SEEN) == Estimate(least_s=5.0, likely_s=5.0, most_s=5.0)


def test_a_time_limit_alone_says_when_it_is_over_at_the_latest() -> None:
    assert estimate(spec(time_limit_s=100.0, grace_s=20.0), None) == Estimate(most_s=120.0)


@pytest.mark.parametrize("learned", [SEEN, None])
def test_no_job_takes_longer_than_its_limit_and_its_grace(learned: Durations | None) -> None:
    said = spec(time_limit_s=30.0, grace_s=5.0) if learned else spec(duration_s=90.0, time_limit_s=30.0, grace_s=5.0)
    assert estimate(said, learned) == Estimate(least_s=30.0, likely_s=30.0, most_s=35.0)


def test_a_limit_that_is_far_away_changes_nothing() -> None:
    assert estimate(spec(time_limit_s=1e6), SEEN) == estimate(spec(), SEEN)
