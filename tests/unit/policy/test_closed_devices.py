"""Devices that a user drained or that the configuration bans: nothing new starts there, what runs goes on."""

from msgspec.structs import replace

from gpuyard.model.lease import Drain, Need
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.policy.plan import decide
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import World
from tests.unit.policy.test_placement import GB, card, devices_of, lease, machine, shared
from tests.unit.policy.test_planner import queue, started, view, waiting_job

DRAIN = Drain(device_id="G0", uid=1000, user="ann", since=0.0, reason="ECC errors")


def closed_view(seen: Snapshot, *drains: Drain, banned: tuple[str, ...] = ()) -> Machine:
    return Machine(now=0.0, snapshot=seen, closed=closed_devices(seen, drains, banned))


def with_drain(planner_view: World) -> World:
    machine = planner_view.machine
    return replace(planner_view, machine=replace(machine, closed=closed_devices(machine.snapshot, [DRAIN], ())))


def test_a_closed_device_gets_no_work_nor_do_its_parts() -> None:
    # Work goes to other devices.
    assert devices_of(choose(Need(), closed_view(machine(card(0), card(1)), DRAIN))) == ("G1",)
    assert devices_of(choose(shared(GB), closed_view(machine(card(0), card(1)), banned=("G0",)))) == ("G1",)
    # The drain or ban of a card holds for its parts.
    parts = [replace(card(number), parent="G0") for number in (1, 2)]
    seen = machine(card(0), *parts, card(3))
    assert devices_of(choose(Need(), closed_view(seen, DRAIN))) == ("G3",)
    assert devices_of(choose(Need(), closed_view(seen, banned=("G0",)))) == ("G3",)


def test_the_reason_names_the_user_the_time_and_why() -> None:
    choice = choose(Need(only=("G0",)), closed_view(machine(card(0), card(1)), DRAIN))
    assert choice.claim is None
    reason = next(each for each in choice.reasons if each.device_id == "G0")
    assert reason.kind is ReasonKind.CLOSED
    assert reason.text.startswith("drained by ann since 1970-01-01 ")
    assert reason.text.endswith(": ECC errors")
    assert "gpuyard devices undrain" in reason.remedy


def test_jobs_wait_resume_and_preempt_around_a_drained_device() -> None:
    plan = decide(with_drain(view(queue(1, Need(devices=2)), queue(2, Need()), on=2)))
    assert started(plan) == {2: ("G1",)}, "a job that waits for a drained device keeps no other device free"
    assert ReasonKind.CLOSED in {reason.kind for reason in waiting_job(plan, 1).reasons}
    # A suspended job resumes on its drained device.
    resumed = queue(-7, replace(shared(GB), only=("G0",), is_resumed=True), 7, resumes=True)
    assert started(decide(with_drain(view(resumed, queue(2, shared(GB)), on=1)))) == {7: ("G0",)}
    # No job is preempted on a drained device.
    urgent = queue(1, Need(), priority=100, preempts=True)
    plan = decide(with_drain(view(urgent, on=1, leases=[lease("a", "G0")])))
    assert (plan.starts, plan.preempts, plan.head) == ((), (), waiting_job(plan, 1))
