"""Crews: so many on a device, spread evenly and started apart, in crowds and across the deaths of daemons."""

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.core.lease import FixedMemory
from gpuyard.core.scheduling import need_variants
from gpuyard.core.scheduling.tag_sharing import TagSharing
from tests.scale import seeds
from tests.simulation.clients import Operation, operations
from tests.simulation.natures import wild_nature
from tests.simulation.play import WITHIN_S, Play, Played, Script
from tests.simulation.test_stories import play, submit

SEEDS = seeds(10, full=30)
AT_ONCE = 10
Crews = dict[str, TagSharing]


def task(at: float, token: str, crew: TagSharing, *words: str, tag: str = "w", **options: Any) -> Operation:
    asked = submit(at, token, *words, tag=tag, **options).asked
    assert asked is not None
    return Operation(at=at, kind="submit", asked=replace(asked, crew=crew))


def sweeping(seed: int) -> tuple[Script, Crews, dict[str, str]]:
    """One to three crews among others; and to which of them each task belongs, by its name."""
    random = Random(f"{seed} crews")
    crews = {
        f"w{number}": TagSharing(most_per_device=random.randint(1, 4), stagger_s=random.choice((0.0, 0.5, 2.0)))
        for number in range(random.randint(1, 3))
    }
    tasks, tags = [], {}
    for tag, crew in crews.items():
        for number in range(random.randint(2, 7)):
            token = f"{tag}t{number}"
            tags[token] = tag
            options = random.choice(({}, {}, {"vram": "4G"}, {"retries": "2"}, {"gpus": "2"}, {"priority": "2"}))
            at = random.choice((0.0, random.uniform(0.0, 20.0)))
            tasks.append(task(at, token, crew, tag=tag, **options))
    others = operations(seed, 2 + seed % 4, WITHIN_S)
    script = Script(
        seed=seed,
        operations=tuple(sorted([*tasks, *others], key=lambda operation: operation.at)),
        others=seed % 3,
        trouble=0.06 if seed % 4 == 0 else 0.0,
        devices=1 + seed % 3,
        measures_every_s=3.0,
    )
    return script, crews, tags


def check(played: Played, crews: Crews, tags: dict[str, str]) -> int:
    """How many tasks began; each within the rule of its crew, with all that live at that moment."""
    tag_of = {what[1][0]: tags.get(what[0]) for _, kind, what in played.log if kind == "acknowledged"}
    live: dict[tuple[int, int], tuple[str, tuple[str, ...]]] = {}
    granted: dict[str, tuple[str, ...]] = {}
    last: dict[str, float] = {}
    begun = 0
    for at, kind, what in played.log:
        if kind == "granted":
            granted[what[0]] = what[1]
        elif kind == "over":
            live.pop(what[0], None)
        elif kind == "reboot":
            live.clear()
        elif kind == "begins" and (tag := tag_of.get(what[0])):
            begun += 1
            live[what] = (tag, granted.get(f"job {what[0]}", ()))
            counts = Counter(device for other, devices in live.values() if other == tag for device in devices)
            assert all(count <= crews[tag].most_per_device for count in counts.values()), (at, tag, counts)
            assert at - last.get(tag, -1e9) >= crews[tag].stagger_s - 1e-6, (at, tag)
            last[tag] = at
    return begun


def play_sweeping(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[Played, int]:
    script, crews, tags = sweeping(seed)
    try:
        played = Play(script, crash_at, wild_nature(seed)).run()
        return played, check(played, crews, tags)
    except AssertionError as error:
        error.add_note(f"in the story of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_crews_keep_their_rule_wherever_the_daemon_is_killed(first: int) -> None:
    begun = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        passed = len(play_sweeping(seed)[0].passed)
        often = frozenset(random.randrange(2 * passed) for _ in range(2 + passed // 100))
        played, count = play_sweeping(seed, often)
        begun += count
        deaths += played.deaths
    assert begun > 3 * AT_ONCE
    assert deaths > AT_ONCE


def test_a_crew_that_crowds_a_device_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need_variants, "spread_need", lambda need, *_: [replace(need, memory=FixedMemory(1.0))])
    assert any(is_crowded(seed) for seed in range(20))


def is_crowded(seed: int) -> bool:
    try:
        play_sweeping(seed)
    except AssertionError as error:
        return "Counter" in str(error)
    return False


def test_the_next_of_a_crew_starts_when_its_time_has_come_and_not_later() -> None:
    crew = TagSharing(most_per_device=4, stagger_s=2.0)
    kills = [Operation(at=at, kind="kill") for at in (0.5, 2.5, 3.9)]
    played = play(*(task(0, f"t{number}", crew, "30", vram="1G") for number in range(4)), *kills)
    times = sorted(played.starts.values())
    assert all(2.0 <= after - before < 2.2 for before, after in pairwise(times))


def test_a_crew_that_is_full_changes_nothing_for_the_others() -> None:
    crew = TagSharing(most_per_device=1)
    tasks = [task(0, f"t{number}", crew, "50", vram="4G", priority="5") for number in range(6)]
    others = [submit(1 + number, f"j{number}", "10", vram="4G") for number in range(3)]
    played = play(*tasks, *others, devices=1)
    assert [played.starts[f"j{number}"] for number in range(3)] == [1, 2, 3]
