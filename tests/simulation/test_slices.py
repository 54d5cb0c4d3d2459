"""Short jobs that run in slices (ADR 82), beside everything else, and across crashes: see slice_invariants.py. And
faults that these checks catch."""

import re
from collections.abc import Callable, Iterator
from random import Random

import pytest

from gpuyard.queue.launch_jobs import Slices
from tests.scale import seeds, size
from tests.simulation.behaviors import Behavior, BehaviorOf
from tests.simulation.clients import Operation
from tests.simulation.engine import SimulatedEngine
from tests.simulation.keeper import CALM, KeeperHabits, SimulatedKeeper
from tests.simulation.scenario import Scenario, ScenarioResult, Script
from tests.simulation.slice_scenarios import array, random_slices, short_behavior

SEEDS = seeds(6, full=200)
AT_ONCE = 6
POINTS_PER_CRASH = 150
MOST_CRASHES = 10


def simulate_slices(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[ScenarioResult, int]:
    """Run a random scenario. Return its result and the number of programs that took their turn in slices."""
    scenario = Scenario(random_slices(seed), crash_at, short_behavior(seed))
    try:
        return scenario.run(), scenario.checker.slices.turns
    except AssertionError as error:
        error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


def steady(command: tuple[str, ...], _: int) -> Behavior:
    return Behavior(runs_s=0.02)


def _third_is_long(command: tuple[str, ...], _: int) -> Behavior:
    return Behavior(runs_s=5.0 if command[-1] == "3" else 0.02)


def simulate(
    *operations: Operation,
    devices: int = 1,
    behavior_of: BehaviorOf = steady,
    habits: KeeperHabits = CALM,
    crash_at: frozenset[int] = frozenset(),
) -> tuple[ScenarioResult, int]:
    ordered = tuple(sorted(operations, key=lambda one: one.at))
    scenario = Scenario(Script(seed=1, operations=ordered, devices=devices, habits=habits), crash_at, behavior_of)
    return scenario.run(), scenario.checker.slices.turns


def begun(result: ScenarioResult) -> list[int]:
    """Return the jobs whose programs began, in order."""
    return [what[0] for _, kind, what in result.log if kind == "begins"]


# Crashes


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_none_of_a_slice_is_lost_wherever_the_daemon_is_killed(first: int) -> None:
    turns = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        result, count = simulate_slices(seed)
        passed, turns = len(result.passed), turns + count
        once = frozenset({random.randrange(passed)})
        often = frozenset(
            random.randrange(2 * passed) for _ in range(min(MOST_CRASHES, 1 + passed // POINTS_PER_CRASH))
        )
        for crash_at in (once, often):
            result, count = simulate_slices(seed, crash_at)
            turns += count
            deaths += result.deaths
    assert turns > 10 * AT_ONCE
    assert deaths > 2 * AT_ONCE


@pytest.mark.parametrize("devices", [0, 1])
def test_the_daemon_may_be_killed_at_every_crash_point_of_a_slice(devices: int) -> None:
    short = (array(0, "s", 9, gpus=devices, duration="20ms"), Operation(at=0.03, kind="hold", jobs="name=s"))
    result, turns = simulate(*short)
    points = {point for point, _ in result.passed}
    assert turns >= 2
    assert {"engine.withdraw", "engine.site_changes"} <= points
    for place in range(0, len(result.passed), size(53, full=1)):
        result, _ = simulate(*short, crash_at=frozenset({place}))
        assert result.crashed
        assert len(begun(result)) == len(set(begun(result))) == 9
        assert set(result.states.values()) == {"succeeded"}


def test_the_same_seed_gives_the_same_scenario_with_slices() -> None:
    for seed in range(3):
        assert simulate_slices(seed)[0].log == simulate_slices(seed)[0].log


# What the keeper does


def test_the_jobs_of_a_slice_follow_each_other_without_a_step_in_between() -> None:
    result, turns = simulate(array(0, "s", 40, gpus=1, duration="20ms"))
    assert turns > 20
    assert begun(result) == list(range(1, 41))


def test_a_failed_job_does_not_stop_the_rest_of_its_slice() -> None:
    def fails_once(command: tuple[str, ...], _: int) -> Behavior:
        return Behavior(runs_s=0.02, exit_status="1" if command[-1] == "7" else "0")

    result, turns = simulate(array(0, "s", 20, gpus=1, duration="20ms"), behavior_of=fails_once)
    assert turns > 10
    assert begun(result) == list(range(1, 21))


def test_the_rest_of_a_slice_is_queued_again_when_one_of_it_takes_too_long() -> None:
    result, turns = simulate(array(0, "s", 20, gpus=1, vram="4G", duration="20ms"), behavior_of=_third_is_long)
    assert turns
    assert max(at for at, kind, _ in result.log if kind == "begins") < 2.0  # on the other places of the device
    assert set(result.states.values()) == {"succeeded"}


def test_an_urgent_job_waits_for_a_second_at_most() -> None:
    urgent = array(0.1, "u", 1, gpus=1, priority=5)
    result, turns = simulate(array(0, "s", 200, gpus=1, duration="20ms"), urgent)
    assert turns > 100
    assert result.starts["u.0"] < 0.1 + 1.1


def test_what_the_keeper_has_after_the_death_of_its_daemon_starts_with_the_next_one_only() -> None:
    habits = KeeperHabits(stops=0.5, stops_s=0.3)
    kills = [Operation(at=at, kind="kill") for at in (0.05, 0.1, 0.3, 0.5)]
    result, _ = simulate(array(0, "s", 40, gpus=0, duration="20ms"), *kills, habits=habits)
    assert sorted(begun(result)) == list(range(1, 41))
    assert set(result.states.values()) == {"succeeded"}


@pytest.mark.parametrize(("stop", "start"), [("pause", "unpause"), ("stop_tag", "start_tag")])
def test_what_has_not_begun_waits_while_the_queue_or_its_tag_is_stopped(stop: str, start: str) -> None:
    orders = (Operation(at=0.11, kind=stop, jobs="day"), Operation(at=5.0, kind=start, jobs="day"))
    result, turns = simulate(array(0, "s", 60, gpus=0, tag="day", duration="20ms"), *orders)
    assert turns > 20
    assert not [at for at, kind, _ in result.log if kind == "begins" and 0.15 < at < 5.0]


# Faults that the checks must catch


def _slice_while_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slices, "begin_change", lambda self: None)
    monkeypatch.setattr(Slices, "end_change", lambda self: None)


def _forget_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEngine, "_begun_in_journal", lambda self: [])


def _start_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedKeeper, "lose_daemon", lambda self: None)
    monkeypatch.setattr(SimulatedKeeper, "greet", lambda self: None)


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_slice_while_requests_are_answered, "while a request is carried out|after it was answered"),
        (_forget_what_has_begun, "runs and is not recorded|runs twice|have one lease|begins twice"),
        (_start_without_a_daemon, "runs and is not recorded|runs twice|have one lease|begins twice"),
    ],
)
def test_the_checks_catch_a_keeper_or_daemon_that_breaks_a_rule(
    sabotage: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    assert any(re.search(caught, message) for message in failed_checks(100))


def failed_checks(count: int) -> Iterator[str]:
    """Yield the message of each scenario in which a check fails."""
    for seed in range(2, count):
        random = Random(seed)
        try:
            simulate_slices(seed, frozenset(random.randrange(3000) for _ in range(6)))
        except AssertionError as error:
            yield str(error)


def test_the_checks_catch_a_slice_that_lasts_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuyard.queue.launch_jobs.LONGEST_S", 60.0)
    with pytest.raises(AssertionError, match=r"takes its turn .* after its slice began"):
        simulate(array(0, "s", 20, gpus=1, duration="20ms"), behavior_of=_third_is_long)
