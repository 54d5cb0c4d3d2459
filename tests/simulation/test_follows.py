"""Short jobs that a keeper starts by itself, one after the other (ADR 82), beside everything else, and across crashes:
see follow_invariants.py. And faults that these checks catch."""

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.control.successors import Successors
from tests.scale import seeds, size
from tests.simulation.behaviors import Behavior, BehaviorOf
from tests.simulation.clients import Operation
from tests.simulation.follow_scenarios import array, random_follows, short_behavior
from tests.simulation.keeper import CALM, KeeperHabits, SimulatedKeeper
from tests.simulation.scenario import Scenario, ScenarioResult, Script

SEEDS = seeds(6, full=200)
AT_ONCE = 6
POINTS_PER_CRASH = 150
MOST_CRASHES = 10


def simulate_follows(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[ScenarioResult, int]:
    """Run a random scenario. Return its result and the number of programs that a keeper started by itself."""
    scenario = Scenario(random_follows(seed), crash_at, short_behavior(seed))
    try:
        return scenario.run(), scenario.checker.follows.followed
    except AssertionError as error:
        error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


def steady(command: tuple[str, ...], _: int) -> Behavior:
    return Behavior(runs_s=0.02)


def simulate(
    *operations: Operation,
    devices: int = 1,
    behavior_of: BehaviorOf = steady,
    habits: KeeperHabits = CALM,
    crash_at: frozenset[int] = frozenset(),
) -> tuple[ScenarioResult, int]:
    ordered = tuple(sorted(operations, key=lambda one: one.at))
    scenario = Scenario(Script(seed=1, operations=ordered, devices=devices, habits=habits), crash_at, behavior_of)
    return scenario.run(), scenario.checker.follows.followed


def begun(result: ScenarioResult) -> list[int]:
    """Return the jobs whose programs began, in order."""
    return [what[0] for _, kind, what in result.log if kind == "begins"]


# Crashes


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_short_jobs_follow_each_other_and_none_is_lost_wherever_the_daemon_is_killed(first: int) -> None:
    followed = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        result, count = simulate_follows(seed)
        passed, followed = len(result.passed), followed + count
        once = frozenset({random.randrange(passed)})
        often = frozenset(
            random.randrange(2 * passed) for _ in range(min(MOST_CRASHES, 1 + passed // POINTS_PER_CRASH))
        )
        for crash_at in (once, often):
            result, count = simulate_follows(seed, crash_at)
            followed += count
            deaths += result.deaths
    assert followed > 10 * AT_ONCE
    assert deaths > 2 * AT_ONCE


@pytest.mark.parametrize("devices", [0, 1])
def test_the_daemon_may_be_killed_at_every_crash_point_while_jobs_follow(devices: int) -> None:
    short = (array(0, "s", 9, gpus=devices, duration="20ms"), Operation(at=0.03, kind="hold", jobs="name=s"))
    result, followed = simulate(*short)
    points = {point for point, _ in result.passed}
    assert followed >= 2
    assert {"engine.put", "engine.take_back", "engine.followed", "engine.followed_before"} <= points
    for place in range(0, len(result.passed), size(53, full=1)):
        result, _ = simulate(*short, crash_at=frozenset({place}))
        assert result.crashed
        assert len(begun(result)) == len(set(begun(result))) == 9
        assert set(result.states.values()) == {"succeeded"}


def test_the_same_seed_gives_the_same_scenario_with_followers() -> None:
    for seed in range(3):
        assert simulate_follows(seed)[0].log == simulate_follows(seed)[0].log


# What the keeper does


def test_jobs_follow_each_other_without_a_step_in_between() -> None:
    result, followed = simulate(array(0, "s", 40, gpus=1, duration="20ms"))
    assert followed > 20
    assert begun(result) == list(range(1, 41))


def test_after_a_failed_job_a_step_decides() -> None:
    def fails_once(command: tuple[str, ...], _: int) -> Behavior:
        return Behavior(runs_s=0.02, exit_status="1" if command[-1] == "7" else "0")

    result, _ = simulate(array(0, "s", 20, gpus=1, duration="20ms"), behavior_of=fails_once)
    kinds = [(kind, what) for _, kind, what in result.log]
    assert ("taken", (9, 1)) not in kinds
    assert begun(result) == list(range(1, 21))


def test_what_the_keeper_has_after_the_death_of_its_daemon_starts_with_the_next_one_only() -> None:
    habits = KeeperHabits(stops=0.5, stops_s=0.3)
    kills = [Operation(at=at, kind="kill") for at in (0.05, 0.1, 0.3, 0.5)]
    result, _ = simulate(array(0, "s", 40, gpus=0, duration="20ms"), *kills, habits=habits)
    assert sorted(begun(result)) == list(range(1, 41))
    assert set(result.states.values()) == {"succeeded"}


def test_a_pause_that_was_answered_stops_what_was_prefetched() -> None:
    pauses = (Operation(at=0.1, kind="pause"), Operation(at=5.0, kind="unpause"))
    result, followed = simulate(array(0, "s", 60, gpus=0, duration="20ms"), *pauses)
    assert followed > 20
    assert not [at for at, kind, _ in result.log if kind == "begins" and 0.15 < at < 5.0]


def test_a_tag_that_was_stopped_stops_what_follows() -> None:
    stops = (Operation(at=0.11, kind="stop_tag", jobs="day"), Operation(at=5.0, kind="start_tag", jobs="day"))
    result, followed = simulate(array(0, "s", 60, gpus=0, tag="day", duration="20ms"), *stops)
    assert followed > 20
    assert not [at for at, kind, _ in result.log if kind == "begins" and 0.15 < at < 5.0]


def test_a_limit_that_is_lowered_holds_although_each_end_has_a_successor() -> None:
    """The invariants see to it."""
    limits = (Operation(at=0.11, kind="limits"), Operation(at=5.0, kind="why"))
    result, followed = simulate(array(0, "s", 60, gpus=0, duration="20ms"), *limits)
    assert followed > 20
    assert set(result.states.values()) == {"succeeded"}


def test_a_limit_that_is_raised_lets_the_prefetched_jobs_start_first() -> None:
    limits = (Operation(at=at, kind="limits") for at in (0.0, 0.11))
    result, followed = simulate(array(0, "s", 60, gpus=0, duration="20ms"), *limits, Operation(at=1.0, kind="why"))
    assert followed > 20
    assert begun(result) == list(range(1, 61))


def test_a_job_that_the_plan_cannot_start_yet_keeps_its_place_before_the_prefetched_ones() -> None:
    """Jobs of 4 GB leave room that is too small for a job of 9 GB: the first of those is taken back for nothing."""
    result, followed = simulate(
        array(0, "small", 6, gpus=1, vram="4G", duration="20ms"),
        array(0, "large", 20, gpus=1, vram="9G", duration="20ms"),
        devices=2,
        behavior_of=lambda command, _: Behavior(runs_s=0.017 if command[-1] == "1" else 0.02),
    )
    assert followed
    assert [each for each in begun(result) if each > 6] == list(range(7, 27))


def test_a_job_that_the_keeper_gives_back_starts_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing else would wake the daemon."""
    monkeypatch.setattr(SimulatedKeeper, "_take", _take_wrongly_once)
    result, _ = simulate(array(0, "s", 3, gpus=1, duration="20ms"))
    assert begun(result) == [1, 2, 3]
    assert max(at for at, kind, _ in result.log if kind == "begins") < 0.1


def _take_wrongly_once(self: SimulatedKeeper, group: int) -> Any:
    launch = self._queue.popleft() if self._queue and self._is_open else None
    is_last = (
        launch is not None and launch.job_id == 3 and not any(program.job_id == 3 for program in self._world.programs)
    )
    return replace(launch, group=group + 1) if launch is not None and is_last else launch


# Faults that the checks must catch


def _put_while_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Successors, "begin_change", lambda self: None)
    monkeypatch.setattr(Successors, "end_change", lambda self: None)


def _forget_earlier_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Successors, "record_earlier", lambda self, now: None)


def _start_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedKeeper, "lose_daemon", lambda self: None)
    monkeypatch.setattr(SimulatedKeeper, "greet", lambda self: None)


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_put_while_requests_are_answered, "while a request is carried out"),
        (_forget_earlier_starts, "runs and is not recorded|runs twice|have one lease|begins twice"),
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
            simulate_follows(seed, frozenset(random.randrange(3000) for _ in range(6)))
        except AssertionError as error:
            yield str(error)


def test_the_checks_catch_a_program_with_the_lease_of_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedKeeper, "_take", _take_any)
    small = array(0, "small", 5, gpus=1, vram="4G", duration="50ms", priority=1)
    with pytest.raises(AssertionError, match=r"needs 9216\.0 MB, and its lease has 4096\.0"):
        simulate(small, array(0, "large", 20, gpus=1, vram="9G", duration="20ms"), devices=2)


def _take_any(self: SimulatedKeeper, group: int) -> Any:
    launch = self._queue.popleft() if group and self._queue and self._is_open else None
    return None if launch is None else replace(launch, group=group)
