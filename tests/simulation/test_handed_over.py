"""Work that is handed over, with the daemon killed between any two calls of its ports: nothing is lost by it, nothing
runs twice, and every invariant holds after every turn (see invariants.py and outpost.py)."""

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpuyard.core.job.submission import SubmissionRequest
from gpuyard.engines.cluster import engine, in_flight
from tests.scale import FULL, seeds
from tests.simulation.clients import Operation
from tests.simulation.cluster import CALAMITIES, MOST_JOBS, Course
from tests.simulation.gaps import Gap
from tests.simulation.outpost import ENGINE, LAST, HandingPlay, wild_handing
from tests.simulation.play import Played, Script

SEEDS = seeds(5, full=20)
AT_ONCE = 5
CRASHES_PER_SEED = 2
GAPS_PER_CRASH = 100


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stories put the world's in its place."""
    monkeypatch.setattr(engine, "time", time)
    monkeypatch.setattr(in_flight, "time", time)
    monkeypatch.setattr(in_flight, "secrets", secrets)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where there is such a place: thousands of small files come and go."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def play(folder: Path, seed: int, crash_at: frozenset[int] = frozenset(), **other: Any) -> Played:
    script, cluster = wild_handing(seed)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            return HandingPlay(script, Path(name), crash_at=crash_at, **{**cluster, **other}).run()
        except AssertionError as error:
            error.add_note(f"in the story of seed {seed}, with crashes at {sorted(crash_at)}")
            raise


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_nothing_is_lost_and_nothing_runs_twice_wherever_the_daemon_is_killed(folder: Path, first: int) -> None:
    crashed: set[Gap] = set()
    deaths = 0
    for seed in range(first, first + AT_ONCE):
        passed = play(folder, seed).passed
        places = {gap: place for place, gap in enumerate(passed)}
        random = Random(seed)
        fresh = [place for gap, place in places.items() if gap not in crashed]
        chosen = [frozenset({place}) for place in random.sample(fresh, min(len(fresh), CRASHES_PER_SEED))]
        often = frozenset(random.randrange(2 * len(passed)) for _ in range(1 + len(passed) // GAPS_PER_CRASH))
        for crash_at in (*chosen, often):
            played = play(folder, seed, crash_at)
            crashed.update(played.crashed)
            deaths += played.deaths
    assert deaths >= 2 * AT_ONCE


@pytest.mark.parametrize("seed", [1, 2] if FULL else [2])
def test_every_gap_between_the_outpost_and_its_site_may_be_the_last(folder: Path, seed: int) -> None:
    def story(crash_at: frozenset[int]) -> Played:
        return tell(folder, submit(0.0, "a", array="0-1"), submit(0.1, "b", priority="1"), crash_at=crash_at, seed=seed)

    passed = story(frozenset()).passed
    ports = ("outpost.", "site.", "submissions.")
    # There is no end of looking: the first few times are as good as all.
    kinds: dict[Gap, list[int]] = {}
    for place, gap in enumerate(passed):
        kinds.setdefault(gap, []).append(place)
    chosen = [place for gap, places in kinds.items() if gap[0].startswith(ports) for place in places[:4]]
    assert len(chosen) > 60
    for place in chosen:
        played = story(frozenset({place}))
        assert played.crashed
        assert set(played.states.values()) == {"succeeded"}


def tell(folder: Path, *operations: Operation, crash_at: frozenset[int] = frozenset(), **cluster: Any) -> Played:
    """Of programs that do as they are told: `run SECONDS [CALAMITY]`."""
    script = Script(seed=cluster.pop("seed", 1), operations=(*operations, LAST))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return HandingPlay(script, Path(name), crash_at=crash_at, course_of=plain_course, **cluster).run()


def submit(at: float, token: str, *words: str, **options: Any) -> Operation:
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    command = (token, *(words or ("2",)), *(["{index}"] if "array" in options else []))
    asked = SubmissionRequest(
        cwd="/", environment={}, token=token, command=command, options={"name": token, "engine": ENGINE, **typed}
    )
    return Operation(at=at, kind="submit", asked=asked)


def plain_course(words: tuple[str, ...], attempt: int) -> Course:
    calamity = words[2] if len(words) > 2 and words[2] in CALAMITIES and attempt == 1 else ""
    return Course(runs_s=float(words[1]), calamity=calamity)


def test_what_was_lost_is_run_again_and_what_was_cancelled_there_is_not(folder: Path) -> None:
    played = tell(folder, *(submit(0.0, calamity, "8", calamity) for calamity in CALAMITIES))
    expected = dict.fromkeys(CALAMITIES, "succeeded") | {"scancel": "cancelled"}
    assert played.states == expected


def test_what_is_free_is_handed_over_once_though_submissions_come_quickly(folder: Path) -> None:
    quick = [submit(1.0 + 0.03 * number, f"q{number}", "5", array="0-2") for number in range(4)]
    played = tell(folder, *quick, tells_free=True)
    assert set(played.states.values()) == {"succeeded"}


def test_a_daemon_that_dies_while_the_folder_is_away_takes_over_when_it_is_back(folder: Path) -> None:
    operations = [submit(0.0, "a", "30"), submit(0.0, "b", "6"), Operation(at=10.0, kind="kill")]
    played = tell(folder, *operations, spells=[(8.0, 30.0, "away")])
    assert played.states == {"a": "succeeded", "b": "succeeded"}
    assert played.deaths == 1


def test_what_was_refused_is_tried_again_in_its_time_and_not_without_end(folder: Path) -> None:
    """More than there may be at once: some of them wait, though not for the refusal any more."""
    played = tell(folder, submit(0.0, "a", array=f"0-{2 * MOST_JOBS}"), spells=[(0.0, 6.0, "refuses")])
    assert set(played.states.values()) == {"succeeded"}
    assert sum(kind == "step" for _, kind, _ in played.log) < 200


def test_the_same_seed_gives_the_same_story(folder: Path) -> None:
    for seed in range(3):
        assert play(folder, seed).log == play(folder, seed).log
