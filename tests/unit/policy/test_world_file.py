"""A world that was written to a file gives the same plan, with the same reasons."""

import math

import pytest
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Process
from gpuyard.policy import plan as planner
from gpuyard.policy.plan import read_world, write_world
from gpuyard.policy.rules import Rule
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import Plan, World
from gpuyard.queue import decide_starts as planner_input
from tests.simulation.scenario import Scenario, random_script
from tests.unit.policy.test_placement import card, machine
from tests.unit.policy.test_planner import queue, view
from tests.unit.policy.test_rules import CASES


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
