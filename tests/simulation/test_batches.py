"""Batches: their pace under load from outside, in crowds, and across the deaths of daemons (see pace_invariants.py)."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from tests.scale import seeds, size
from tests.simulation.batches import FIGURES, RUN, batch, paced, paced_nature
from tests.simulation.clients import Operation
from tests.simulation.natures import Nature
from tests.simulation.play import Play, Played, Script
from tests.simulation.test_stories import submit
from tests.simulation.world import RAM_MB, Hog

SEEDS = seeds(10, full=30)
AT_ONCE = 10
GAPS_PER_CRASH = 100
LONG_S = 60.0
HOGS = {
    "cpu": (Hog(at=4.0, lasts_s=LONG_S, cpu_percent=90.0), {"max_cpu": 80}),
    "ram": (Hog(at=4.0, lasts_s=LONG_S, ram_mb=0.9 * RAM_MB), {"min_free_mem_mb": 20_000}),
    "gpu": (Hog(at=4.0, lasts_s=LONG_S, gpu_percent=90.0), {"max_gpu": 80}),
}


def play_paced(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[Played, int]:
    """And how many runs of batches were launched in it."""
    played = Play(paced(seed), crash_at, paced_nature(seed))
    try:
        return played.run(), played.checker.launches
    except AssertionError as error:
        error.add_note(f"in the story of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


def steady_nature(words: tuple[str, ...], _: int) -> Nature:
    """Runs of batches take two seconds; of others, the second word says how long they take."""
    if words[0] != RUN:
        return Nature(runs_s=float(words[1]))
    vram_mb, ram_mb = words[3:]
    return Nature(runs_s=2.0, climbs=((1.0, float(vram_mb)),), ram_mb=float(ram_mb), ram_after_s=1.0)


def play(
    *operations: Operation,
    hogs: tuple[Hog, ...] = (),
    devices: int = 1,
    blind: frozenset[str] = frozenset(),
    crash_at: frozenset[int] = frozenset(),
) -> Played:
    ordered = tuple(sorted(operations, key=lambda one: one.at))
    script = Script(seed=1, operations=ordered, hogs=hogs, devices=devices, blind=blind)
    return Play(script, crash_at, steady_nature).run()


def begun(played: Played) -> list[float]:
    """When anything began, in order."""
    return [at for at, kind, _ in played.log if kind == "begins"]


def most_at_once(played: Played) -> int:
    running = most = 0
    for _, kind, _ in played.log:
        running += {"begins": 1, "over": -1}.get(kind, 0)
        most = max(most, running)
    return most


def later(at: float) -> Operation:
    """Somebody asks why, so that the story, and the load in it, goes on until then."""
    return Operation(at=at, kind="why")


# Whatever happens


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_batches_keep_their_pace_wherever_the_daemon_is_killed(first: int) -> None:
    launches = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        passed = len(play_paced(seed)[0].passed)
        once = frozenset({random.randrange(passed)})
        often = frozenset(random.randrange(2 * passed) for _ in range(2 + passed // GAPS_PER_CRASH))
        for crash_at in (once, often):
            played, launched = play_paced(seed, crash_at)
            launches += launched
            deaths += played.deaths
    assert launches > 10 * AT_ONCE
    assert deaths > 3 * AT_ONCE


def test_every_single_gap_of_a_batch_may_be_the_last() -> None:
    short = (batch(0, "b", 3, vram_mb=1500, concurrency=2, stagger="1s", max_gpu_mem_mb=6000),)
    count = len(play(*short).passed)
    assert count > 100
    for place in range(0, count, size(5, full=1)):
        played = play(*short, crash_at=frozenset({place}))
        assert played.crashed
        assert set(played.states.values()) == {"succeeded"}
        assert all(after - before >= 1.0 for before, after in pairwise(begun(played)))


def test_the_same_seed_gives_the_same_story_with_batches() -> None:
    for seed in range(10):
        assert play_paced(seed)[0].log == play_paced(seed)[0].log


# How many and how fast


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_as_many_run_at_once_as_the_batch_says(concurrency: int) -> None:
    played = play(batch(0, "b", 12, vram_mb=1500, concurrency=concurrency))
    assert most_at_once(played) == concurrency
    assert played.attempts == 12


def test_runs_start_apart_though_daemons_come_and_go() -> None:
    kills = [Operation(at=at, kind="kill") for at in (0.5, 1.5, 2.0, 3.9, 6.1)]
    played = play(batch(0, "b", 5, concurrency=5, stagger="2s", gpus=0), *kills)
    times = begun(played)
    assert len(times) == 5
    assert all(2.0 <= after - before < 2.2 for before, after in pairwise(times))


def test_without_a_stagger_runs_start_as_fast_as_somebody_looks() -> None:
    played = play(batch(0, "b", 8, concurrency=8, gpus=0))
    assert begun(played)[-1] < 1.0


def test_a_device_is_filled_up_to_its_bound_though_no_run_has_taken_its_memory_yet() -> None:
    played = play(batch(0, "b", 6, vram_mb=3000, concurrency=6, max_gpu_mem_mb=6500), devices=2)
    assert most_at_once(played) == 4


# Load from outside


@pytest.mark.parametrize("figure", FIGURES)
def test_load_from_outside_delays_launches_while_it_lasts_and_not_after(figure: str) -> None:
    hog, bounds = HOGS[figure]
    options: dict[str, Any] = {"concurrency": 2, "smoothing": "1s", "steady": "2s", **bounds}
    calm = play(batch(0, "b", 12, vram_mb=1500, **options), later(90.0))
    played = play(batch(0, "b", 12, vram_mb=1500, **options), later(90.0), hogs=(hog,))
    assert begun(calm)[-1] < 30.0
    times = begun(played)
    ends_at = hog.at + hog.lasts_s
    assert not [at for at in times if hog.at + 4.0 <= at < ends_at]
    assert [at for at in times if at < hog.at]
    assert ends_at < times[-1] < ends_at + 30.0
    assert set(played.states.values()) == {"succeeded"}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_that_nobody_gives_holds_nothing_back_and_the_others_do(figure: str) -> None:
    blind = frozenset({figure})
    for name, (hog, bounds) in HOGS.items():
        options: dict[str, Any] = {"concurrency": 2, "smoothing": "1s", **bounds}
        played = play(batch(0, "b", 8, vram_mb=1500, **options), later(90.0), hogs=(hog,), blind=blind)
        is_held_up = begun(played)[-1] >= hog.at + hog.lasts_s
        assert is_held_up is (name != figure)
        assert set(played.states.values()) == {"succeeded"}


# In nobody's way


def crowd(seed: int) -> list[Operation]:
    random = Random(seed)
    return [
        submit(random.uniform(0.0, 20.0), f"j{number}", str(random.randint(1, 10)),
               **random.choice(({"vram": "8G"}, {"vram": "14G"}, {"gpus": "2"}, {"gpus": "0"}, {})))
        for number in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_that_waits_for_its_gates_changes_nothing_for_the_others(seed: int) -> None:
    waits = batch(1.0, "b", 30, vram_mb=12_000, concurrency=6, priority=3, max_cpu=80)
    hog = Hog(at=0.0, lasts_s=300.0, cpu_percent=90.0)
    alone = play(*crowd(seed), later(200.0), hogs=(hog,), devices=2)
    beside = play(waits, *crowd(seed), later(200.0), hogs=(hog,), devices=2)
    crowded = play(waits, *crowd(seed), later(200.0), devices=2)
    of_others = {name: at for name, at in beside.starts.items() if not name.startswith("b.")}
    assert of_others == alone.starts
    assert min(beside.starts[name] for name in beside.starts.keys() - of_others.keys()) >= 200.0
    assert sum(crowded.starts[name] for name in alone.starts) > sum(alone.starts.values()) + 3.0


def test_a_batch_takes_no_slots_from_jobs_without_devices() -> None:
    played = play(
        batch(0, "b", 6, concurrency=6, gpus=0), submit(0.5, "c0", "5", gpus="0"), submit(0.5, "c1", "5", gpus="0")
    )
    assert played.starts["c0"] == played.starts["c1"] == 0.5
