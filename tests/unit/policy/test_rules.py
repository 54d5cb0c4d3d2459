"""Each rule keeps a job waiting for its reason, and nothing else does: without the rule in the list, the job starts."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import HostShare, Need
from gpuyard.model.machine_snapshot import Host, Process
from gpuyard.policy import plan as planner
from gpuyard.policy.machine import Packing
from gpuyard.policy.plan import decide, read_world, write_world
from gpuyard.policy.rules import (
    RULES,
    DeviceLoad,
    FreeDisk,
    FreeMemory,
    HostLoad,
    HostRoom,
    Leased,
    OtherPrograms,
    Paused,
    Power,
    Rule,
    RunningLimit,
    SharedDevice,
    Stagger,
    Together,
    UsableDevice,
)
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.policy.world import Plan, PowerLimit, World
from gpuyard.queue import decide_starts as planner_input
from tests.simulation.scenario import Scenario, random_script
from tests.unit.policy.test_placement import GB, card, lease, machine, shared
from tests.unit.policy.test_planner import NOW, PAUSED, queue, running, view


def packed(world: World, **packing: Any) -> World:
    return replace(world, machine=replace(world.machine, packing=Packing(**packing)))


def busy(kind: ReasonKind) -> Reason:
    return Reason(kind, "for a test", needed=1.0)


BESIDE = lease("a", "G0", memory_mb=4 * GB)
FULL_DISK = replace(
    queue(1, Need()), jobs=(replace(each, full_disks=(busy(ReasonKind.DISK_FULL),)) for each in queue(1, Need()).jobs)
)
LACKS_RAM = machine(card(0), host=Host(memory_total_mb=16 * GB, memory_available_mb=GB))
DRAWING: dict[str, Any] = {"device_ids": ("G0",), "lease_id": "a"}
POWERFUL = machine(*(card(each, power_draw_w=100.0, power_limit_w=300.0) for each in (0, 1)))

CASES: list[tuple[type[Rule], World, ReasonKind]] = [
    (Paused, view(queue(1, Need()), closed_reasons=(PAUSED,)), ReasonKind.PAUSED),
    (RunningLimit, view(queue(1, Need(), tag="a"), tags={"a": 1}, running=[running(7, "a")]), ReasonKind.LIMIT),
    (Stagger, view(queue(1, Need(), group=3, stagger_s=9.0), array_starts={3: NOW - 1.0}), ReasonKind.STAGGERED),
    (HostLoad, view(queue(1, Need()), closed_reasons=(busy(ReasonKind.HOST_TOO_BUSY),)), ReasonKind.HOST_TOO_BUSY),
    (FreeDisk, view(FULL_DISK), ReasonKind.DISK_FULL),
    (HostRoom, view(queue(1, replace(Need(), host=HostShare(ram_mb=8 * GB))), on=LACKS_RAM), ReasonKind.HOST_ROOM),
    (UsableDevice, view(queue(1, Need(model="h100"))), ReasonKind.NOT_ASKED_FOR),
    (Leased, view(queue(1, Need()), leases=[BESIDE]), ReasonKind.LEASED),
    (
        DeviceLoad,
        view(queue(1, Need(max_utilization_percent=5.0)), on=machine(card(0, utilization_percent=9.0))),
        ReasonKind.TOO_BUSY,
    ),
    (FreeMemory, view(queue(1, shared(22 * GB)), leases=[BESIDE]), ReasonKind.NO_ROOM),
    (OtherPrograms, view(queue(1, Need()), on=machine(card(0, used=9 * GB))), ReasonKind.OCCUPIED),
    (SharedDevice, packed(view(queue(1, shared(GB)), leases=[BESIDE]), max_jobs_per_device=1), ReasonKind.LIMIT),
    (
        Power,
        view(
            queue(1, Need()), on=POWERFUL, leases=[lease("a", "G0")], running=[running(7, **DRAWING)],
            power=PowerLimit(limit_w=500.0, running_w={7: 250.0}),
        ),
        ReasonKind.POWER_LIMIT,
    ),
]  # fmt: skip


def kinds(world: World, rules: tuple[Rule, ...] = RULES) -> list[ReasonKind]:
    [job] = decide(world, explained_lane=1, rules=rules).waiting
    return [reason.kind for reason in job.reasons]


def without(rule: type[Rule]) -> tuple[Rule, ...]:
    return tuple(each for each in RULES if type(each) is not rule)


@pytest.mark.parametrize(("rule", "world", "kind"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_without_a_rule_that_gives_its_reason_the_job_starts(rule: type[Rule], world: World, kind: ReasonKind) -> None:
    assert kinds(world)[0] is kind
    assert [start.job_id for start in decide(world, rules=without(rule)).starts] == [1]


def test_a_job_gets_all_of_its_devices_together() -> None:
    world = view(queue(1, Need(devices=2)))
    assert kinds(world) == [ReasonKind.TOO_FEW]
    assert kinds(world, without(Together)) == []


def test_each_rule_has_a_case_its_kinds_and_remedies() -> None:
    assert [*(rule for rule, _, _ in CASES[:-1]), Together, Power] == [type(rule) for rule in RULES]
    assert all(kind in rule.kinds for rule, _, kind in CASES), "each rule has a case and a kind that it may give"
    assert {remedy for rule in RULES for remedy in rule.remedies} == set(REMEDIES), "each remedy belongs to a rule"


def test_the_reasons_of_an_earlier_rule_come_first() -> None:
    """A device that is refused by several rules has the reason of the first."""
    asked = Need(model="h100", max_utilization_percent=5.0)
    world = view(queue(1, asked), on=machine(card(0, used=9 * GB, utilization_percent=9.0)), leases=[BESIDE])
    for rule, kind in (
        (UsableDevice, ReasonKind.NOT_ASKED_FOR),
        (Leased, ReasonKind.LEASED),
        (DeviceLoad, ReasonKind.TOO_BUSY),
        (OtherPrograms, ReasonKind.OCCUPIED),
    ):
        left = RULES[[type(each) for each in RULES].index(rule) :]
        assert kinds(world, left)[0] is kind


def test_the_reference_page_is_made_from_the_rules() -> None:
    made = subprocess.run([sys.executable, "scripts/rules-page"], capture_output=True, text=True, check=True).stdout
    assert Path("docs/reference/rules.md").read_text(encoding="utf-8") == made, "run scripts/rules-page --write"


@pytest.mark.parametrize(("rule", "world", "kind"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_reason_of_each_rule_is_the_same_from_a_file(rule: type[Rule], world: World, kind: ReasonKind) -> None:
    again = read_world(write_world(world, job_id=1, lane=1))
    assert again.decide() == planner.decide(world, explained_lane=1)
    assert again.restored() == world
    assert kind in rule.kinds


def test_all_plans_of_simulated_worlds_are_the_same_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def decide(world: World, *, explained_lane: int | None = None) -> Plan:
        plan = planner.decide(world, explained_lane=explained_lane)
        lane = math.inf if explained_lane is None else explained_lane
        file = read_world(write_world(world, job_id=1, lane=-1 if lane == math.inf else int(lane)))
        assert planner.decide(file.restored(), explained_lane=explained_lane) == plan
        decided.append(bool(plan.starts))
        return plan

    monkeypatch.setattr(planner_input, "decide", decide)
    for seed in range(6):
        Scenario(random_script(seed)).run()
    assert sum(decided) > 10


def test_names_of_processes_that_no_reason_names_are_left_out() -> None:
    busy = machine(replace(card(0), processes=(Process(pid=7, memory_mb=1.0, name="/opt/secret/tool"),)))
    written = write_world(view(queue(1, Need()), on=busy), job_id=1, lane=1)
    assert b"secret" not in written
    assert read_world(written).world.machine.snapshot.devices[0].processes == (Process(pid=7, memory_mb=1.0),)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": "gpuyard world 99"}'])
def test_another_file_is_refused_with_a_hint(content: bytes) -> None:
    with pytest.raises(UserError) as raised:
        read_world(content)
    assert raised.value.hint
