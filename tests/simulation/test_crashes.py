"""The daemon is killed between any two calls of its ports, once or many times in a story. Nothing is lost by it,
nothing runs twice, and every invariant holds after every turn (see invariants.py)."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.scale import FULL, seeds
from tests.simulation.gaps import Gap
from tests.simulation.play import Play, Played, wild

SEEDS = seeds(10, full=90)
AT_ONCE = 10
CRASHES_PER_SEED = 3
GAPS_PER_CRASH = 80
ROOT = Path(__file__).parents[2]


@dataclass
class Tally:
    """Which kinds of gaps there were, where to find one of each, and in which somebody died."""

    found: dict[Gap, tuple[int, int]] = field(default_factory=dict)
    crashed: set[Gap] = field(default_factory=set)
    stories: int = 0
    deaths: int = 0

    def play(self, seed: int, crash_at: frozenset[int] = frozenset()) -> Played:
        try:
            played = Play(wild(seed), crash_at).run()
        except AssertionError as error:
            error.add_note(f"in the story of seed {seed}, with crashes at {sorted(crash_at)}")
            raise
        assert crash_at or not played.crashed
        self.crashed.update(played.crashed)
        self.stories += 1
        self.deaths += played.deaths
        return played

    def missing(self) -> list[Gap]:
        return [gap for gap in self.found if gap not in self.crashed]


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_nothing_is_lost_and_nothing_runs_twice_wherever_the_daemon_is_killed(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + AT_ONCE):
        passed = tally.play(seed).passed
        places = {gap: (seed, place) for place, gap in enumerate(passed)}
        tally.found = {**places, **tally.found}
        random = Random(seed)
        fresh = [gap for gap in places if gap not in tally.crashed]
        chosen = [places[gap][1] for gap in random.sample(fresh, min(len(fresh), CRASHES_PER_SEED))]
        chosen += [random.randrange(len(passed)) for _ in range(CRASHES_PER_SEED - len(chosen))]
        for place in chosen:
            tally.play(seed, frozenset({place}))
        often = frozenset(random.randrange(2 * len(passed)) for _ in range(1 + len(passed) // GAPS_PER_CRASH))
        tally.play(seed, often)
    for gap in tally.missing():
        seed, place = tally.found[gap]
        tally.play(seed, frozenset({place}))
    assert not tally.missing()
    assert tally.stories >= AT_ONCE * (CRASHES_PER_SEED + 2)
    assert tally.deaths >= 3 * tally.stories // 2
    assert len(tally.found) > 80


@pytest.mark.parametrize("seed", [8, 57, 99] if FULL else [57])
def test_every_single_gap_of_a_short_story_may_be_the_last(seed: int) -> None:
    tally = Tally()
    count = len(tally.play(seed).passed)
    assert count > 100
    for place in range(count):
        assert tally.play(seed, frozenset({place})).crashed


@pytest.mark.parametrize("seed", [47, 90, 131])
def test_a_daemon_that_dies_again_and_again_gets_everything_done(seed: int) -> None:
    played = Play(wild(seed), frozenset(range(0, 20_000, 97))).run()
    assert played.deaths > 10


def test_the_same_seed_gives_the_same_story() -> None:
    for seed in range(20 if FULL else 5):
        assert Play(wild(seed)).run().log == Play(wild(seed)).run().log


def test_the_same_seed_gives_the_same_story_in_another_process() -> None:
    """Whatever order its sets have."""
    assert _digest_with("1") == _digest_with("2")


def _digest_with(hash_seed: str) -> str:
    call = [sys.executable, "-c", "from tests.simulation.test_crashes import digest; print(digest())"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=True)
    return ran.stdout.strip()


def digest() -> str:
    logs = [Play(wild(seed), frozenset({100 * seed})).run().log for seed in range(1, 10)]
    return hashlib.sha256(repr(logs).encode()).hexdigest()
