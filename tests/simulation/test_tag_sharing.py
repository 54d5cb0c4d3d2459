"""Tag sharing: at most N jobs of a tag on a device, evenly spread and started apart, across crashes of the daemon."""

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job_spec import TagSharing
from gpuyard.model.lease import FixedMemory
from gpuyard.policy import plan as planner
from tests.scale import seeds
from tests.simulation.behaviors import random_behavior
from tests.simulation.clients import Operation, operations
from tests.simulation.scenario import WITHIN_S, Scenario, ScenarioResult, Script
from tests.simulation.test_scenarios import simulate, submit

SEEDS = seeds(10, full=30)
AT_ONCE = 10
SharingRules = dict[str, TagSharing]


def task(at: float, token: str, rule: TagSharing, *command: str, tag: str = "w", **options: Any) -> Operation:
    asked = submit(at, token, *command, tag=tag, **options).asked
    assert asked is not None
    return Operation(at=at, kind="submit", asked=replace(asked, tag_sharing=rule))


def random_tasks(seed: int) -> tuple[Script, SharingRules, dict[str, str]]:
    """Return a script with one to three shared tags among other jobs, their rules by tag, and the tag of each task."""
    random = Random(f"{seed} crews")
    rules = {
        f"w{number}": TagSharing(most_per_device=random.randint(1, 4), stagger_s=random.choice((0.0, 0.5, 2.0)))
        for number in range(random.randint(1, 3))
    }
    tasks, tags = [], {}
    for tag, rule in rules.items():
        for number in range(random.randint(2, 7)):
            token = f"{tag}t{number}"
            tags[token] = tag
            options = random.choice(({}, {}, {"vram": "4G"}, {"retries": "2"}, {"gpus": "2"}, {"priority": "2"}))
            at = random.choice((0.0, random.uniform(0.0, 20.0)))
            tasks.append(task(at, token, rule, tag=tag, **options))
    others = operations(seed, 2 + seed % 4, WITHIN_S)
    script = Script(
        seed=seed,
        operations=tuple(sorted([*tasks, *others], key=lambda operation: operation.at)),
        others=seed % 3,
        trouble=0.06 if seed % 4 == 0 else 0.0,
        devices=1 + seed % 3,
        measures_every_s=3.0,
    )
    return script, rules, tags


def check(result: ScenarioResult, rules: SharingRules, tags: dict[str, str]) -> int:
    """Assert that each task began within the rule of its tag, and return how many began."""
    tag_of = {what[1][0]: tags.get(what[0]) for _, kind, what in result.log if kind == "acknowledged"}
    live: dict[tuple[int, int], tuple[str, tuple[str, ...]]] = {}
    granted: dict[str, tuple[str, ...]] = {}
    last: dict[str, float] = {}
    begun = 0
    for at, kind, what in result.log:
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
            assert all(count <= rules[tag].most_per_device for count in counts.values()), (at, tag, counts)
            assert at - last.get(tag, -1e9) >= rules[tag].stagger_s - 1e-6, (at, tag)
            last[tag] = at
    return begun


def simulate_tasks(seed: int, crash_at: frozenset[int] = frozenset()) -> tuple[ScenarioResult, int]:
    script, rules, tags = random_tasks(seed)
    try:
        result = Scenario(script, crash_at, random_behavior(seed)).run()
        return result, check(result, rules, tags)
    except AssertionError as error:
        error.add_note(f"in the scenario of seed {seed}, with crashes at {sorted(crash_at)}")
        raise


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_the_sharing_rule_of_a_tag_holds_wherever_the_daemon_is_killed(first: int) -> None:
    begun = deaths = 0
    for seed in range(first, first + AT_ONCE):
        random = Random(seed)
        passed = len(simulate_tasks(seed)[0].passed)
        often = frozenset(random.randrange(2 * passed) for _ in range(2 + passed // 100))
        result, count = simulate_tasks(seed, often)
        begun += count
        deaths += result.deaths
    assert begun > 3 * AT_ONCE
    assert deaths > AT_ONCE


def test_a_device_with_too_many_jobs_of_a_tag_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "spread_need", lambda need, *_: [replace(need, memory=FixedMemory(1.0))])
    assert any(is_crowded(seed) for seed in range(20))


def is_crowded(seed: int) -> bool:
    try:
        simulate_tasks(seed)
    except AssertionError as error:
        return "Counter" in str(error)
    return False


def test_the_next_task_of_a_tag_starts_exactly_after_the_stagger() -> None:
    rule = TagSharing(most_per_device=4, stagger_s=2.0)
    kills = [Operation(at=at, kind="kill") for at in (0.5, 2.5, 3.9)]
    result = simulate(*(task(0, f"t{number}", rule, "30", vram="1G") for number in range(4)), *kills)
    times = sorted(result.starts.values())
    assert all(2.0 <= after - before < 2.2 for before, after in pairwise(times))


def test_a_tag_at_its_limit_per_device_does_not_delay_other_jobs() -> None:
    rule = TagSharing(most_per_device=1)
    tasks = [task(0, f"t{number}", rule, "50", vram="4G", priority="5") for number in range(6)]
    others = [submit(1 + number, f"j{number}", "10", vram="4G") for number in range(3)]
    result = simulate(*tasks, *others, devices=1)
    assert [result.starts[f"j{number}"] for number in range(3)] == [1, 2, 3]
