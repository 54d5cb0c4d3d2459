"""Jobs on a cluster, with the daemon killed between any two calls of its ports: no job is lost, no job runs twice, and
every invariant holds after every turn (see invariants.py and cluster_scenario.py)."""

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpuyard.engines.cluster import engine, in_flight
from gpuyard.model.submission import SubmissionRequest
from tests.scale import FULL, seeds
from tests.simulation.clients import Operation
from tests.simulation.cluster import FAILURES, MOST_JOBS, ClusterBehavior
from tests.simulation.cluster_scenario import ENGINE, LAST, ClusterScenario, random_cluster_scenario
from tests.simulation.crash_points import CrashPoint
from tests.simulation.scenario import ScenarioResult, Script

SEEDS = seeds(5, full=20)
AT_ONCE = 5
CRASHES_PER_SEED = 2
POINTS_PER_CRASH = 100


@pytest.fixture(autouse=True)
def _restore_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the clock and the tokens, which scenarios replace."""
    monkeypatch.setattr(engine, "time", time)
    monkeypatch.setattr(in_flight, "time", time)
    monkeypatch.setattr(in_flight, "secrets", secrets)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a temporary folder, in memory if possible: scenarios create thousands of small files."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def simulate(folder: Path, seed: int, crash_at: frozenset[int] = frozenset(), **other: Any) -> ScenarioResult:
    script, cluster = random_cluster_scenario(seed)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            return ClusterScenario(script, Path(name), crash_at=crash_at, **{**cluster, **other}).run()
        except AssertionError as error:
            error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
            raise


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_cluster_job_is_lost_or_runs_twice_wherever_the_daemon_is_killed(folder: Path, first: int) -> None:
    crashed: set[CrashPoint] = set()
    deaths = 0
    for seed in range(first, first + AT_ONCE):
        passed = simulate(folder, seed).passed
        places = {point: place for place, point in enumerate(passed)}
        random = Random(seed)
        fresh = [place for point, place in places.items() if point not in crashed]
        chosen = [frozenset({place}) for place in random.sample(fresh, min(len(fresh), CRASHES_PER_SEED))]
        often = frozenset(random.randrange(2 * len(passed)) for _ in range(1 + len(passed) // POINTS_PER_CRASH))
        for crash_at in (*chosen, often):
            result = simulate(folder, seed, crash_at)
            crashed.update(result.crashed)
            deaths += result.deaths
    assert deaths >= 2 * AT_ONCE


@pytest.mark.parametrize("seed", [1, 2] if FULL else [2])
def test_the_daemon_may_be_killed_between_any_calls_of_the_cluster_engine_and_its_site(folder: Path, seed: int) -> None:
    def run_scenario(crash_at: frozenset[int]) -> ScenarioResult:
        return simulate_plain(
            folder, submit(0.0, "a", array="0-1"), submit(0.1, "b", priority="1"), crash_at=crash_at, seed=seed
        )

    passed = run_scenario(frozenset()).passed
    ports = ("cluster engine.", "site.", "submissions.")
    # The engine polls all the time: the first four calls of each kind are enough.
    kinds: dict[CrashPoint, list[int]] = {}
    for place, point in enumerate(passed):
        kinds.setdefault(point, []).append(place)
    chosen = [place for point, places in kinds.items() if point[0].startswith(ports) for place in places[:4]]
    assert len(chosen) > 60
    for place in chosen:
        result = run_scenario(frozenset({place}))
        assert result.crashed
        assert set(result.states.values()) == {"succeeded"}


def simulate_plain(
    folder: Path, *operations: Operation, crash_at: frozenset[int] = frozenset(), **cluster: Any
) -> ScenarioResult:
    """Run a scenario of programs that do what their command says: `NAME SECONDS [FAILURE]`."""
    script = Script(seed=cluster.pop("seed", 1), operations=(*operations, LAST))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return ClusterScenario(
            script, Path(name), crash_at=crash_at, behavior_of=plain_cluster_behavior, **cluster
        ).run()


def submit(at: float, token: str, *command: str, **options: Any) -> Operation:
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    command = (token, *(command or ("2",)), *(["{index}"] if "array" in options else []))
    asked = SubmissionRequest(
        cwd="/", environment={}, token=token, command=command, options={"name": token, "engine": ENGINE, **typed}
    )
    return Operation(at=at, kind="submit", asked=asked)


def plain_cluster_behavior(command: tuple[str, ...], attempt: int) -> ClusterBehavior:
    failure = command[2] if len(command) > 2 and command[2] in FAILURES and attempt == 1 else ""
    return ClusterBehavior(runs_s=float(command[1]), failure=failure)


def test_a_job_that_the_cluster_loses_is_retried_and_a_job_cancelled_there_is_not(folder: Path) -> None:
    result = simulate_plain(folder, *(submit(0.0, failure, "8", failure) for failure in FAILURES))
    expected = dict.fromkeys(FAILURES, "succeeded") | {"scancel": "cancelled"}
    assert result.states == expected


def test_free_gpus_of_the_cluster_are_used_once_when_submissions_come_quickly(folder: Path) -> None:
    quick = [submit(1.0 + 0.03 * number, f"q{number}", "5", array="0-2") for number in range(4)]
    result = simulate_plain(folder, *quick, reports_free=True)
    assert set(result.states.values()) == {"succeeded"}


def test_a_new_daemon_adopts_jobs_when_an_unavailable_shared_folder_is_back(folder: Path) -> None:
    operations = [submit(0.0, "a", "30"), submit(0.0, "b", "6"), Operation(at=10.0, kind="kill")]
    result = simulate_plain(folder, *operations, outages=[(8.0, 30.0, "away")])
    assert result.states == {"a": "succeeded", "b": "succeeded"}
    assert result.deaths == 1


def test_a_refused_submission_is_retried_after_pauses(folder: Path) -> None:
    """The array is larger than the site's limit: after the refusal, some of its jobs still wait for that limit."""
    result = simulate_plain(folder, submit(0.0, "a", array=f"0-{2 * MOST_JOBS}"), outages=[(0.0, 6.0, "refuses")])
    assert set(result.states.values()) == {"succeeded"}
    assert sum(kind == "step" for _, kind, _ in result.log) < 200


def test_the_same_seed_gives_the_same_cluster_scenario(folder: Path) -> None:
    for seed in range(3):
        assert simulate(folder, seed).log == simulate(folder, seed).log
