"""Which figures are faults, which are alarms, and what clearing a device accepts."""

import pytest
from msgspec.structs import replace

from gpuyard.model.lease import Drain, FixedMemory, Need, WholeDevice
from gpuyard.model.machine_snapshot import Device, HealthFigures, HealthMark, IssueKind, Snapshot, Throttle, XidEvent
from gpuyard.policy.device_health import XIDS, Severity, closed_devices, device_issues, find_issues, first_faults
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.policy.plan import decide
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import World
from tests.unit.policy.test_placement import GB, card, devices_of, lease, machine, on_cards, shared
from tests.unit.policy.test_planner import queue, started, view, waiting_job

NARROW = HealthFigures(link_width=8, link_width_max=16)


def judged(health: HealthFigures | None, *marks: HealthMark) -> list[tuple[IssueKind, Severity]]:
    return [(issue.kind, issue.severity) for issue in find_issues(card(0, health=health), marks)]


def mark(kind: IssueKind | None = None, since: float = 100.0, **fields: object) -> HealthMark:
    return HealthMark(device_id="G0", since=since, kind=kind, **fields)  # type: ignore[arg-type]


def xids(*codes: int, at: float = 100.0) -> HealthFigures:
    return HealthFigures(xids=tuple(XidEvent(code=code, at=at) for code in codes))


@pytest.mark.parametrize(
    ("health", "kind", "severity"),
    [
        (xids(79), IssueKind.XID, Severity.FAULT),
        (xids(92), IssueKind.XID, Severity.ALARM),
        (HealthFigures(ecc_uncorrected=1), IssueKind.ECC, Severity.FAULT),
        (HealthFigures(remap_pending=True), IssueKind.REMAP_PENDING, Severity.FAULT),
        (HealthFigures(remap_failed=True), IssueKind.REMAP_FAILED, Severity.FAULT),
        (HealthFigures(is_lost=True), IssueKind.LOST, Severity.FAULT),
        (HealthFigures(throttle=(Throttle.HW_THERMAL,)), IssueKind.THROTTLED, Severity.ALARM),
        (HealthFigures(unreleased_mb=4 * GB), IssueKind.UNRELEASED, Severity.ALARM),
        (NARROW, IssueKind.LINK, Severity.ALARM),
    ],
)
def test_each_figure_has_a_severity_and_a_remedy(health: HealthFigures, kind: IssueKind, severity: Severity) -> None:
    assert judged(health) == [(kind, severity)]
    (issue,) = find_issues(card(0, health=health), ())
    assert issue.remedy


@pytest.mark.parametrize(
    "health",
    [
        None,
        HealthFigures(),
        HealthFigures(ecc_uncorrected=0, remap_pending=False, remap_failed=False, throttle=()),
        HealthFigures(link_width=16, link_width_max=16),
        HealthFigures(link_width=None, link_width_max=16),
        xids(13, 31, 43, 45, 68, 109),
        xids(9999),
    ],
)
def test_normal_and_unknown_figures_and_errors_of_programs_are_no_issue(health: HealthFigures | None) -> None:
    assert judged(health) == []


def test_the_xids_of_programs_are_not_those_of_cards() -> None:
    assert XIDS.keys().isdisjoint({13, 31, 43, 45, 68, 69, 109})
    assert {48, 63, 64, 74, 79, 92, 94, 95, 119, 120} <= XIDS.keys()


def test_marks_say_since_when_and_do_not_outlast_their_figure() -> None:
    assert judged(None, mark(IssueKind.XID, xid=79)) == [(IssueKind.XID, Severity.FAULT)]
    (issue,) = find_issues(card(0, health=xids(79, at=200.0)), [mark(IssueKind.XID, xid=79)])
    assert issue.since == 100.0, "a recorded Xid is a fault although this process saw no event"
    noted = mark(IssueKind.ECC)
    (issue,) = find_issues(card(0, health=HealthFigures(ecc_uncorrected=1)), [noted])
    assert issue.since == 100.0, "a mark of a figure says since when and does not outlast the figure"
    assert judged(HealthFigures(ecc_uncorrected=0), noted) == []
    # A link that lost lanes is a fault until it has them again.
    noted = mark(IssueKind.LINK)
    assert judged(NARROW, noted) == [(IssueKind.LINK, Severity.FAULT)]
    assert judged(HealthFigures(link_width=16, link_width_max=16), noted) == []


def test_clearing_accepts_what_was_and_not_what_gets_worse() -> None:
    accepted = HealthFigures(ecc_uncorrected=2, remap_pending=True, link_width=8, link_width_max=16)
    cleared = mark(since=300.0, accepted=accepted)
    assert judged(accepted, cleared, mark(IssueKind.XID, xid=48)) == []
    assert judged(xids(48, at=299.0), cleared) == []
    assert judged(xids(48, at=301.0), cleared) == [(IssueKind.XID, Severity.FAULT)]
    assert judged(HealthFigures(ecc_uncorrected=3), cleared) == [(IssueKind.ECC, Severity.FAULT)]
    assert judged(HealthFigures(remap_failed=True), cleared) == [(IssueKind.REMAP_FAILED, Severity.FAULT)]
    assert judged(HealthFigures(link_width=4, link_width_max=16), cleared) == [(IssueKind.LINK, Severity.ALARM)]
    # After the driver was loaded again its counter starts from zero.
    cleared = mark(since=300.0, accepted=HealthFigures(ecc_uncorrected=5))
    assert judged(HealthFigures(ecc_uncorrected=1), cleared) == [(IssueKind.ECC, Severity.FAULT)]


def test_faults_come_first_reach_parts_and_have_a_remedy() -> None:
    seen = machine(card(0, health=HealthFigures(ecc_uncorrected=1)), card(1), card(2, parent="G0"))
    assert first_faults(device_issues(seen, ())).keys() == {"G0", "G2"}
    health = HealthFigures(throttle=(Throttle.SW_THERMAL,), ecc_uncorrected=1)
    assert [severity for _, severity in judged(health)] == [Severity.FAULT, Severity.ALARM], "faults come before alarms"
    seen = machine(card(0, health=xids(79)))
    reason = closed_devices(seen, (), ())["G0"]
    assert reason.kind is ReasonKind.UNHEALTHY
    assert "Xid 79" in reason.text
    assert "gpuyard devices clear" in reason.remedy, "the reason names the fault and the remedy"


@pytest.mark.parametrize("memory", [FixedMemory(2 * GB), WholeDevice(2 * GB)])
def test_a_faulty_device_gets_no_work_and_a_hot_one_last(memory: FixedMemory | WholeDevice) -> None:
    need = Need(memory=memory)
    hot = card(0, health=HealthFigures(throttle=(Throttle.HW_THERMAL,)))
    broken = card(1, health=HealthFigures(ecc_uncorrected=1))

    def place(*devices: Device) -> tuple[str, ...]:
        return devices_of(choose(need, on_cards(*devices, closed=closed_devices(machine(*devices), (), ()))))

    assert place(hot, broken, card(2)) == ("G2",)
    assert place(hot, broken) == ("G0",)
    assert place(broken) == ()


DRAIN = Drain(device_id="G0", uid=1000, user="ann", since=0.0, reason="ECC errors")


def closed_view(seen: Snapshot, *drains: Drain, banned: tuple[str, ...] = ()) -> Machine:
    return Machine(now=0.0, snapshot=seen, closed=closed_devices(seen, drains, banned))


def with_drain(planner_view: World) -> World:
    machine = planner_view.machine
    return replace(planner_view, machine=replace(machine, closed=closed_devices(machine.snapshot, [DRAIN], ())))


def test_a_closed_device_gets_no_work_nor_do_its_parts() -> None:
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
