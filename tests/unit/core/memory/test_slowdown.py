"""The slow-down beside others, learned from how long runs took."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.memory.slowdown import (
    SlowdownFit,
    add_run,
    coefficient,
    prior_coefficient,
    run_beside,
    slowdown,
)

loads = st.floats(0.0, 1000.0)
durations = st.floats(0.1, 1e7)


def learned(*runs: tuple[float, float], program: SlowdownFit | None = None) -> tuple[SlowdownFit, SlowdownFit]:
    """Return the fits of a program and of its command after runs of (seconds, load of the neighbours in percent)."""
    command, program = SlowdownFit(), program or SlowdownFit()
    for seconds, percent in runs:
        run = run_beside(command, seconds, percent)
        command, program = add_run(command, run), add_run(program, run)
    return program, command


def test_before_any_run_a_job_that_hardly_uses_the_device_is_hardly_slowed() -> None:
    assert coefficient([]) is None
    assert prior_coefficient(0.0) == 0.0
    assert prior_coefficient(100.0) == pytest.approx(0.5)
    assert prior_coefficient(None) == prior_coefficient(50.0)


def test_runs_that_were_all_alone_or_all_in_the_same_company_say_nothing() -> None:
    assert coefficient(learned((100.0, 0.0), (90.0, 0.0), (110.0, 0.0))) is None
    assert coefficient(learned((100.0, 80.0), (90.0, 80.0))) is None


@pytest.mark.parametrize("true_k", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("percent", [60.0, 100.0, 600.0])
def test_a_few_runs_alone_and_beside_others_show_the_slow_down(true_k: float, percent: float) -> None:
    beside = (60.0 * slowdown(true_k, percent), percent)
    found = coefficient(learned((60.0, 0.0), beside, (61.0, 0.0), beside, beside), 100.0)
    assert found is not None
    assert slowdown(found, percent) == pytest.approx(slowdown(true_k, percent), rel=0.15)


def test_jobs_that_are_slower_together_than_one_after_another_are_recognised() -> None:
    for percent in (60.0, 100.0, 600.0):
        found = coefficient(learned((60.0, 0.0), (60.0 * slowdown(2.0, percent), percent)), 100.0)
        assert found is not None
        assert found > 1.2


def test_durations_that_differ_anyway_hardly_change_what_is_assumed() -> None:
    random = Random(3)
    runs = [(math.exp(random.gauss(6.0, 2.0)), random.choice([0.0, 50.0, 150.0])) for _ in range(30)]
    found = coefficient(learned(*runs), 60.0)
    assert found == pytest.approx(prior_coefficient(60.0), abs=0.25)


def test_other_arguments_of_a_program_start_from_what_its_commands_have_shown() -> None:
    program, _ = learned((10.0, 0.0), (30.0, 100.0), (10.0, 0.0), (30.0, 100.0))
    program, _ = learned((1000.0, 0.0), (3000.0, 100.0), program=program)
    assert coefficient([program], 50.0) == pytest.approx(2.0, rel=0.2)


def test_what_was_true_long_ago_is_forgotten() -> None:
    slow, fast = [(10.0, 0.0), (30.0, 100.0)] * 20, [(10.0, 0.0), (10.5, 100.0)] * 20
    found = coefficient(learned(*slow, *fast))
    assert found is not None
    assert found < 0.2


@given(st.lists(st.tuples(durations, loads), max_size=40), st.none() | st.floats(0.0, 100.0))
def test_the_coefficient_is_always_a_sane_number(runs: list[tuple[float, float]], load: float | None) -> None:
    found = coefficient(learned(*runs), load)
    assert found is None or 0.0 <= found <= 4.0


@given(st.lists(st.tuples(durations, loads), min_size=2, max_size=12), st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(runs: list[tuple[float, float]], factor: float) -> None:
    scaled = [(max(1e-2, seconds) * factor, percent) for seconds, percent in runs]
    runs = [(max(1e-2, seconds), percent) for seconds, percent in runs]
    one, other = coefficient(learned(*runs)), coefficient(learned(*scaled))
    assert (one is None) == (other is None)
    assert one is None or other is None or one == pytest.approx(other, rel=1e-3, abs=1e-3)


def test_two_runs_of_a_command_are_believed_only_where_durations_on_the_machine_repeat() -> None:
    """Two runs are on a line, however much durations differ anyway."""
    one_after_another = [(60.0, 0.0), (120.0, 100.0)]
    random = Random(7)
    erratic = [(60.0 * random.lognormvariate(0.0, 1.0), 100.0 * (number % 2)) for number in range(16)]
    steady = [(60.0 * slowdown(0.5, 100.0 * (number % 2)), 100.0 * (number % 2)) for number in range(16)]
    found = {}
    for name, runs in (("erratic", erratic), ("steady", steady)):
        machine, _ = learned(*runs)
        _, command = learned(*one_after_another)
        found[name] = coefficient([machine, command], 100.0)
        alone = coefficient([machine], 100.0)
        assert alone is not None
        found[f"{name} before"] = alone
    assert found["erratic"] == pytest.approx(found["erratic before"], abs=0.1)
    assert found["steady"] is not None
    assert found["steady before"] is not None
    assert found["steady"] > found["steady before"] + 0.3
