"""The daemon is killed between any two calls of its ports, once or many times in a scenario. No job is lost or runs
twice, and every invariant holds after every turn (see invariants.py)."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.scale import FULL, seeds
from tests.simulation.crash_points import CrashPoint
from tests.simulation.scenario import Scenario, ScenarioResult, random_script

SEEDS = seeds(10, full=90)
AT_ONCE = 10
CRASHES_PER_SEED = 3
POINTS_PER_CRASH = 80
ROOT = Path(__file__).parents[2]


@dataclass
class Tally:
    """The kinds of crash points that occurred, where to find one of each, and those at which a daemon was killed."""

    found: dict[CrashPoint, tuple[int, int]] = field(default_factory=dict)
    crashed: set[CrashPoint] = field(default_factory=set)
    runs: int = 0
    deaths: int = 0

    def simulate(self, seed: int, crash_at: frozenset[int] = frozenset()) -> ScenarioResult:
        try:
            result = Scenario(random_script(seed), crash_at).run()
        except AssertionError as error:
            error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
            raise
        assert crash_at or not result.crashed
        self.crashed.update(result.crashed)
        self.runs += 1
        self.deaths += result.deaths
        return result

    def missing(self) -> list[CrashPoint]:
        return [point for point in self.found if point not in self.crashed]


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_job_is_lost_or_runs_twice_wherever_the_daemon_is_killed(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + AT_ONCE):
        passed = tally.simulate(seed).passed
        places = {point: (seed, place) for place, point in enumerate(passed)}
        tally.found = {**places, **tally.found}
        random = Random(seed)
        fresh = [point for point in places if point not in tally.crashed]
        chosen = [places[point][1] for point in random.sample(fresh, min(len(fresh), CRASHES_PER_SEED))]
        chosen += [random.randrange(len(passed)) for _ in range(CRASHES_PER_SEED - len(chosen))]
        for place in chosen:
            tally.simulate(seed, frozenset({place}))
        often = frozenset(random.randrange(2 * len(passed)) for _ in range(1 + len(passed) // POINTS_PER_CRASH))
        tally.simulate(seed, often)
    for point in tally.missing():
        seed, place = tally.found[point]
        tally.simulate(seed, frozenset({place}))
    assert not tally.missing()
    assert tally.runs >= AT_ONCE * (CRASHES_PER_SEED + 2)
    assert tally.deaths >= 3 * tally.runs // 2
    assert len(tally.found) > 80


@pytest.mark.parametrize("seed", [8, 57, 99] if FULL else [57])
def test_the_daemon_may_be_killed_at_every_crash_point_of_a_short_scenario(seed: int) -> None:
    tally = Tally()
    count = len(tally.simulate(seed).passed)
    assert count > 100
    for place in range(count):
        assert tally.simulate(seed, frozenset({place})).crashed


@pytest.mark.parametrize("seed", [47, 90, 131])
def test_a_daemon_that_is_killed_again_and_again_finishes_all_jobs(seed: int) -> None:
    result = Scenario(random_script(seed), frozenset(range(0, 20_000, 97))).run()
    assert result.deaths > 10


def test_the_same_seed_gives_the_same_scenario() -> None:
    for seed in range(20 if FULL else 5):
        assert Scenario(random_script(seed)).run().log == Scenario(random_script(seed)).run().log


def test_the_same_seed_gives_the_same_scenario_in_another_process() -> None:
    """The order of sets, which differs between processes, has no effect."""
    assert _digest_with("1") == _digest_with("2")


def _digest_with(hash_seed: str) -> str:
    call = [sys.executable, "-c", "from tests.simulation.test_crashes import digest; print(digest())"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=True)
    return ran.stdout.strip()


def digest() -> str:
    logs = [Scenario(random_script(seed), frozenset({100 * seed})).run().log for seed in range(1, 10)]
    return hashlib.sha256(repr(logs).encode()).hexdigest()
