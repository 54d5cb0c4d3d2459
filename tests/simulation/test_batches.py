"""Batches: their pace under foreign load, beside other jobs, and across crashes (see pace_invariants.py)."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from tests.scale import seeds, size
from tests.simulation.batch_scenarios import FIGURES, RUN, batch, paced_behavior, random_batches
from tests.simulation.behaviors import Behavior
from tests.simulation.clients import Operation
from tests.simulation.scenario import Scenario, ScenarioResult, Script
from tests.simulation.test_scenarios import submit
from tests.simulation.world import RAM_MB, LoadSpike

SEEDS = seeds(10, full=30)
AT_ONCE = 10
POINTS_PER_CRASH = 100
LONG_S = 60.0
LOAD_SPIKES = {
    "cpu": (LoadSpike(at=4.0, lasts_s=LONG_S, cpu_percent=90.0), {"max_cpu": 80}),
    "ram": (LoadSpike(at=4.0, lasts_s=LONG_S, ram_mb=0.9 * RAM_MB), {"min_free_mem_mb": 20_000}),
    "gpu": (LoadSpike(at=4.0, lasts_s=LONG_S, gpu_percent=90.0), {"max_gpu": 80}),
}


def simulate_batches(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[ScenarioResult, int]:
    """Run a random scenario. Return its result and the number of runs of batches that were launched."""
    result = Scenario(random_batches(seed), crash_at, paced_behavior(seed))
    try:
        return result.run(), result.checker.launches
    except AssertionError as error:
        error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


def steady_behavior(command: tuple[str, ...], _: int) -> Behavior:
    """Runs of batches take two seconds; other programs take as long as their second argument says."""
    if command[0] != RUN:
        return Behavior(runs_s=float(command[1]))
    vram_mb, ram_mb = command[3:]
    return Behavior(runs_s=2.0, climbs=((1.0, float(vram_mb)),), ram_mb=float(ram_mb), ram_after_s=1.0)


def simulate(
    *operations: Operation,
    load_spikes: tuple[LoadSpike, ...] = (),
    devices: int = 1,
    blind: frozenset[str] = frozenset(),
    crash_at: frozenset[int] = frozenset(),
) -> ScenarioResult:
    ordered = tuple(sorted(operations, key=lambda one: one.at))
    script = Script(seed=1, operations=ordered, load_spikes=load_spikes, devices=devices, blind=blind)
    return Scenario(script, crash_at, steady_behavior).run()


def begun(result: ScenarioResult) -> list[float]:
    """Return the times at which programs began, in order."""
    return [at for at, kind, _ in result.log if kind == "begins"]


def most_at_once(result: ScenarioResult) -> int:
    running = most = 0
    for _, kind, _ in result.log:
        running += {"begins": 1, "over": -1}.get(kind, 0)
        most = max(most, running)
    return most


def later(at: float) -> Operation:
    """Ask `why` at this time, so that the scenario and its load go on until then."""
    return Operation(at=at, kind="why")


# Crashes


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_batches_keep_their_pace_wherever_the_daemon_is_killed(first: int) -> None:
    launches = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        passed = len(simulate_batches(seed)[0].passed)
        once = frozenset({random.randrange(passed)})
        often = frozenset(random.randrange(2 * passed) for _ in range(2 + passed // POINTS_PER_CRASH))
        for crash_at in (once, often):
            result, launched = simulate_batches(seed, crash_at)
            launches += launched
            deaths += result.deaths
    assert launches > 10 * AT_ONCE
    assert deaths > 3 * AT_ONCE


def test_the_daemon_may_be_killed_at_every_crash_point_of_a_batch() -> None:
    short = (batch(0, "b", 3, vram_mb=1500, concurrency=2, stagger="1s", max_gpu_mem_mb=6000),)
    count = len(simulate(*short).passed)
    assert count > 100
    for place in range(0, count, size(5, full=1)):
        result = simulate(*short, crash_at=frozenset({place}))
        assert result.crashed
        assert set(result.states.values()) == {"succeeded"}
        assert all(after - before >= 1.0 for before, after in pairwise(begun(result)))


def test_the_same_seed_gives_the_same_scenario_with_batches() -> None:
    for seed in range(10):
        assert simulate_batches(seed)[0].log == simulate_batches(seed)[0].log


# Concurrency and stagger


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_a_batch_runs_as_many_at_once_as_its_concurrency(concurrency: int) -> None:
    result = simulate(batch(0, "b", 12, vram_mb=1500, concurrency=concurrency))
    assert most_at_once(result) == concurrency
    assert result.attempts == 12


def test_runs_start_a_stagger_apart_across_restarts_of_the_daemon() -> None:
    kills = [Operation(at=at, kind="kill") for at in (0.5, 1.5, 2.0, 3.9, 6.1)]
    result = simulate(batch(0, "b", 5, concurrency=5, stagger="2s", gpus=0), *kills)
    times = begun(result)
    assert len(times) == 5
    assert all(2.0 <= after - before < 2.2 for before, after in pairwise(times))


def test_without_a_stagger_one_run_starts_with_each_sample() -> None:
    result = simulate(batch(0, "b", 8, concurrency=8, gpus=0))
    assert begun(result)[-1] < 1.0


def test_a_device_is_filled_up_to_its_bound_before_runs_have_taken_their_memory() -> None:
    result = simulate(batch(0, "b", 6, vram_mb=3000, concurrency=6, max_gpu_mem_mb=6500), devices=2)
    assert most_at_once(result) == 4


# Foreign load


@pytest.mark.parametrize("figure", FIGURES)
def test_foreign_load_delays_launches_only_while_it_lasts(figure: str) -> None:
    spike, bounds = LOAD_SPIKES[figure]
    options: dict[str, Any] = {"concurrency": 2, "smoothing": "1s", "steady": "2s", **bounds}
    calm = simulate(batch(0, "b", 12, vram_mb=1500, **options), later(90.0))
    result = simulate(batch(0, "b", 12, vram_mb=1500, **options), later(90.0), load_spikes=(spike,))
    assert begun(calm)[-1] < 30.0
    times = begun(result)
    ends_at = spike.at + spike.lasts_s
    assert not [at for at in times if spike.at + 4.0 <= at < ends_at]
    assert [at for at in times if at < spike.at]
    assert ends_at < times[-1] < ends_at + 30.0
    assert set(result.states.values()) == {"succeeded"}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_bound_on_an_unknown_figure_is_ignored_and_the_other_bounds_hold(figure: str) -> None:
    blind = frozenset({figure})
    for name, (spike, bounds) in LOAD_SPIKES.items():
        options: dict[str, Any] = {"concurrency": 2, "smoothing": "1s", **bounds}
        result = simulate(batch(0, "b", 8, vram_mb=1500, **options), later(90.0), load_spikes=(spike,), blind=blind)
        is_held_up = begun(result)[-1] >= spike.at + spike.lasts_s
        assert is_held_up is (name != figure)
        assert set(result.states.values()) == {"succeeded"}


# Beside other jobs


def crowd(seed: int) -> list[Operation]:
    random = Random(seed)
    return [
        submit(random.uniform(0.0, 20.0), f"j{number}", str(random.randint(1, 10)),
               **random.choice(({"vram": "8G"}, {"vram": "14G"}, {"gpus": "2"}, {"gpus": "0"}, {})))
        for number in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_that_waits_for_its_gates_does_not_delay_other_jobs(seed: int) -> None:
    waits = batch(1.0, "b", 30, vram_mb=12_000, concurrency=6, priority=3, max_cpu=80)
    spike = LoadSpike(at=0.0, lasts_s=300.0, cpu_percent=90.0)
    alone = simulate(*crowd(seed), later(200.0), load_spikes=(spike,), devices=2)
    beside = simulate(waits, *crowd(seed), later(200.0), load_spikes=(spike,), devices=2)
    crowded = simulate(waits, *crowd(seed), later(200.0), devices=2)
    of_others = {name: at for name, at in beside.starts.items() if not name.startswith("b.")}
    assert of_others == alone.starts
    assert min(beside.starts[name] for name in beside.starts.keys() - of_others.keys()) >= 200.0
    assert sum(crowded.starts[name] for name in alone.starts) > sum(alone.starts.values()) + 3.0


def test_a_batch_takes_no_slots_from_jobs_without_devices() -> None:
    result = simulate(
        batch(0, "b", 6, concurrency=6, gpus=0), submit(0.5, "c0", "5", gpus="0"), submit(0.5, "c1", "5", gpus="0")
    )
    assert result.starts["c0"] == result.starts["c1"] == 0.5
