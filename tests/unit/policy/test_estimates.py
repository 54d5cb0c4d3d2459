import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.policy.estimates import (
    KEPT_DURATIONS,
    KEPT_PEAKS,
    Estimate,
    FinishedRun,
    Profile,
    estimate,
    fingerprints,
    learn,
    memory_estimate,
    prediction_error,
)
from tests.known import known

SEEN = Profile(count=3, durations_s=(50.0, 80.0, 50.0))
peaks = st.floats(100.0, 80_000.0)


def spec(**given_spec: float) -> JobSpec:
    return replace(JobSpec(command=("true",), cwd="/", environment={}, need=Need()), **given_spec)


def learned(*peaks_mb: float, is_exact: bool = True) -> Profile:
    """Return the profile of complete runs."""
    profile = Profile(is_exact=is_exact)
    for peak_mb in peaks_mb:
        profile = learn(profile, FinishedRun(seconds=10.0, peak_mb=peak_mb))
    return profile


def given_to(profile: Profile) -> float:
    return known(memory_estimate(profile))


def after_runs(*durations_s: float) -> Profile:
    profile = Profile()
    for seconds in durations_s:
        profile = learn(profile, FinishedRun(seconds=seconds))
    return profile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_durations_are_learned_as_least_mean_and_most(runs: list[float]) -> None:
    profile = after_runs(*runs)
    assert profile.count == len(runs)
    assert (profile.least_s, profile.most_s) == pytest.approx((min(runs), max(runs)), abs=1e-3)
    assert profile.mean_s == pytest.approx(sum(runs) / len(runs), abs=1e-3)


def test_what_a_run_teaches_about_time() -> None:
    profile = after_runs(*[1000.0] * 5, *[10.0] * KEPT_DURATIONS)
    assert (profile.count, profile.durations_s) == (5 + KEPT_DURATIONS, (10.0,) * KEPT_DURATIONS)
    # A run that was cut short says nothing about time.
    assert learn(SEEN, FinishedRun(seconds=1.0, is_whole=False, at=5.0)) == replace(SEEN, seen_at=5.0)


def test_peaks_of_runs_that_preallocated_are_not_mixed_with_others() -> None:
    def after(*runs: tuple[float, str]) -> Profile:
        profile = Profile()
        for peak_mb, preallocates in runs:
            profile = learn(profile, FinishedRun(seconds=1.0, peak_mb=peak_mb, preallocates=preallocates))
        return profile

    taken, needed = (18_000.0, "JAX"), (2000.0, "")
    assert after(taken, taken).peaks_mb == (18_000.0, 18_000.0)
    assert (after(taken, needed).peaks_mb, after(taken, needed).preallocates) == ((2000.0,), "")
    assert (after(needed, taken).peaks_mb, after(needed, taken).preallocates) == ((18_000.0,), "JAX")


@given(st.lists(peaks, min_size=2, max_size=80), st.booleans())
def test_a_run_is_given_more_than_nearly_all_of_the_last_ones_used(runs: list[float], is_exact: bool) -> None:
    last = runs[-KEPT_PEAKS:]
    given_mb = given_to(learned(*runs, is_exact=is_exact))
    assert sum(peak > given_mb for peak in last) <= 0.05 * len(last)
    assert given_mb <= max(256.0 + max(last), 1.30 * max(last))


@given(peaks, st.booleans())
def test_the_margin_shrinks_with_evidence_and_never_goes(peak_mb: float, is_exact: bool) -> None:
    margins = [given_to(learned(*[peak_mb] * runs, is_exact=is_exact)) - peak_mb for runs in (2, 3, 8, 32, 100)]
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] >= 255.9


@given(peaks)
def test_a_program_seen_with_other_arguments_gets_more_of_a_margin(peak_mb: float) -> None:
    runs = [peak_mb] * 4
    assert given_to(learned(*runs, is_exact=False)) >= given_to(learned(*runs))


@given(st.floats(100.0, 8_000.0), st.integers(1, 100))
def test_an_input_that_takes_ten_times_as_much_is_learned(peak_mb: float, runs: int) -> None:
    """From two runs at the latest, however many there were before."""
    profile = learned(*[peak_mb] * runs, *[10 * peak_mb] * 2)
    assert given_to(profile) > 10 * peak_mb


@given(st.floats(1_000.0, 8_000.0), st.integers(1, 100))
def test_a_changed_need_is_learned_in_time(peak_mb: float, runs: int) -> None:
    profile = learned(*[10 * peak_mb] * runs, *[peak_mb] * KEPT_PEAKS)
    assert given_to(profile) < 2 * peak_mb


@given(st.lists(peaks, min_size=1, max_size=40), peaks)
def test_memory_that_was_not_enough_is_never_estimated_again(runs: list[float], lacked_mb: float) -> None:
    profile = learn(learned(*runs), FinishedRun(lacked_mb=lacked_mb, is_whole=False))
    assert given_to(profile) > lacked_mb
    assert given_to(profile) >= given_to(learned(*runs))


def test_a_run_teaches_no_more_memory_than_it_showed() -> None:
    before = learned(4000.0, 4000.0)
    assert memory_estimate(learn(before, FinishedRun(peak_mb=100.0, is_whole=False))) == memory_estimate(before)
    assert given_to(learn(before, FinishedRun(peak_mb=9000.0, is_whole=False))) > 9000.0
    assert memory_estimate(learn(Profile(), FinishedRun(peak_mb=100.0, is_whole=False))) is None
    # An unmeasured run teaches nothing about memory.
    assert memory_estimate(learn(Profile(), FinishedRun(seconds=10.0))) is None
    before = learned(4000.0)
    assert memory_estimate(learn(before, FinishedRun(seconds=10.0))) == memory_estimate(before)
    # One run of a command does not predict other commands of the program.
    assert memory_estimate(learned(4000.0, is_exact=False)) is None
    assert memory_estimate(learned(4000.0)) is not None


def test_a_profile_has_the_last_prediction_and_the_actual_use() -> None:
    profile = learn(Profile(), FinishedRun(peak_mb=4000.0, predicted_mb=5000.0))
    assert prediction_error(profile) == 0.25
    cut_short = learn(profile, FinishedRun(peak_mb=9000.0, predicted_mb=1000.0, is_whole=False))
    assert prediction_error(cut_short) == 0.25
    assert prediction_error(Profile(actual_mb=4000.0)) is None


@given(st.lists(st.one_of(st.none(), peaks), max_size=20))
def test_a_profile_has_the_largest_ram_use(runs: list[float | None]) -> None:
    profile = Profile()
    for ram_mb in runs:
        profile = learn(profile, FinishedRun(ram_mb=ram_mb))
    assert profile.ram_mb == max((each for each in runs if each is not None), default=None)


@given(st.lists(peaks, max_size=200))
def test_a_profile_stays_small(runs: list[float]) -> None:
    assert len(learned(*runs).peaks_mb) <= KEPT_PEAKS
    assert all(math.isfinite(peak) for peak in learned(*runs).peaks_mb)


def test_fingerprints_tell_commands_programs_folders_and_vendors_apart() -> None:
    exact, program = fingerprints(("python", "train.py", "--lr", "1"))
    other_exact, same_program = fingerprints(("python", "train.py", "--lr", "2"))
    assert exact != other_exact
    assert program == same_program, "the exact command and its program have different fingerprints"
    assert fingerprints(("python", "-u", "eval.py"))[1] != program
    assert fingerprints(("python", "-u", "train.py"))[1] == program
    exact, program = fingerprints(("python", "train.py"), configuration="a")
    other_exact, same_program = fingerprints(("python", "train.py"), configuration="b")
    assert exact != other_exact
    assert program == same_program, "a configuration that was changed makes another command of the same program"
    here, there = fingerprints(("python", "train.py"), "/a"), fingerprints(("python", "train.py"), "/b")
    assert here[1] != there[1], "a script is that of its folder and a module is itself"
    assert fingerprints(("python", "/x/train.py"), "/a") == fingerprints(("python", "/x/train.py"), "/b")
    assert fingerprints(("python", "-m", "pkg.train"))[1] != fingerprints(("python", "-m", "pkg.eval"))[1]
    assert fingerprints(("echo", "a b"))[0] != fingerprints(("echo", "a", "b"))[0], "words are not joined into others"
    # A command that is not utf 8 has fingerprints too.
    assert fingerprints(("run", "caf\udce9.py"))[1] != fingerprints(("run", "caf\udce8.py"))[1]
    prints = [fingerprints(("python", "train.py"), vendor=vendor) for vendor in (None, "nvidia", "amd")]
    assert len({each for pair in prints for each in pair}) == 6
    assert prints[0] == fingerprints(("python", "train.py")), "a program is learned anew on the GPUs of another vendor"


def test_durations_are_estimated_from_runs_declarations_and_limits() -> None:
    assert estimate(spec(), None) == Estimate(), "an unknown duration has no estimate"
    # One run is no bound of a duration.
    assert estimate(spec(), after_runs(100.0)) == Estimate(least_s=50.0, likely_s=100.0, most_s=200.0)
    assert estimate(spec(), replace(after_runs(100.0), is_exact=False)).most_s == 500.0
    # A declared duration wins over the learned one.
    assert estimate(spec(duration_s=5.0), SEEN) == Estimate(least_s=5.0, likely_s=5.0, most_s=5.0)
    # A time limit alone says when it is over at the latest.
    assert estimate(spec(time_limit_s=100.0, grace_s=20.0), None) == Estimate(most_s=120.0)
    assert estimate(spec(time_limit_s=1e6), SEEN) == estimate(spec(), SEEN), "a limit that is far away changes nothing"


@given(st.lists(st.floats(1.0, 1e5), min_size=1, max_size=KEPT_DURATIONS // 2))
def test_the_margin_of_a_duration_shrinks_with_evidence(runs: list[float]) -> None:
    exact, other = (bounds(replace(after_runs(*runs), is_exact=is_exact)) for is_exact in (True, False))
    again = bounds(after_runs(*runs, *runs))
    assert exact[0] < min(runs)
    assert exact[1] >= max(runs)
    assert again[1] <= exact[1] <= other[1]
    assert exact[1] <= max(runs) * (1.001 + 1.0 / len(runs))


def bounds(profile: Profile) -> tuple[float, float]:
    found = estimate(spec(), profile)
    assert found.least_s is not None
    assert found.most_s is not None
    return found.least_s, found.most_s


@pytest.mark.parametrize("known", [SEEN, None])
def test_no_job_takes_longer_than_its_limit_and_its_grace(known: Profile | None) -> None:
    given_spec = (
        spec(time_limit_s=30.0, grace_s=5.0) if known else spec(duration_s=90.0, time_limit_s=30.0, grace_s=5.0)
    )
    assert estimate(given_spec, known) == Estimate(least_s=30.0, likely_s=30.0, most_s=35.0)
