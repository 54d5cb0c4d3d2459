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

from gpuyard.engines.outpost import cargo, outpost
from tests.simulation.gaps import Gap
from tests.simulation.outpost import HandingPlay, wild_handing
from tests.simulation.play import Played

SEEDS = int(os.environ.get("GPUYARD_SEEDS", "20"))
AT_ONCE = 5
CRASHES_PER_SEED = 2
GAPS_PER_CRASH = 100


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stories put the world's in its place."""
    monkeypatch.setattr(outpost, "time", time)
    monkeypatch.setattr(cargo, "time", time)
    monkeypatch.setattr(cargo, "secrets", secrets)


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
