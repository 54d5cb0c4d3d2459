"""Which figures are faults, which are alarms, and what clearing a device accepts."""

import pytest

from gpuyard.model.lease import FixedMemory, Need, WholeDevice
from gpuyard.model.machine_snapshot import (
    Device,
    HealthFigures,
    HealthMark,
    Host,
    IssueKind,
    Snapshot,
    Throttle,
    Vendor,
    XidEvent,
)
from gpuyard.policy.device_health import XIDS, Severity, closed_devices, device_issues, find_issues, first_faults
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.policy.wait_reasons import ReasonKind

GB = 1024.0
NARROW = HealthFigures(link_width=8, link_width_max=16)


def card(index: int = 0, health: HealthFigures | None = None, parent: str | None = None) -> Device:
    return Device(
        id=f"G{index}", vendor=Vendor.NVIDIA, index=index, memory_total_mb=24 * GB, memory_used_mb=0.0,
        memory_free_mb=24 * GB, utilization_percent=0.0, processes=(), health=health, parent=parent,
    )  # fmt: skip


def snapshot(*devices: Device) -> Snapshot:
    return Snapshot(taken_at=0.0, host=Host(), devices=devices)


def judged(health: HealthFigures | None, *marks: HealthMark) -> list[tuple[IssueKind, Severity]]:
    return [(issue.kind, issue.severity) for issue in find_issues(card(health=health), marks)]


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
    (issue,) = find_issues(card(health=health), ())
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
    (issue,) = find_issues(card(health=xids(79, at=200.0)), [mark(IssueKind.XID, xid=79)])
    assert issue.since == 100.0, "a recorded Xid is a fault although this process saw no event"
    noted = mark(IssueKind.ECC)
    (issue,) = find_issues(card(health=HealthFigures(ecc_uncorrected=1)), [noted])
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
    # What is wrong with a card is wrong with its parts and not with others.
    seen = snapshot(card(0, HealthFigures(ecc_uncorrected=1)), card(1), card(2, parent="G0"))
    assert first_faults(device_issues(seen, ())).keys() == {"G0", "G2"}
    health = HealthFigures(throttle=(Throttle.SW_THERMAL,), ecc_uncorrected=1)
    assert [severity for _, severity in judged(health)] == [Severity.FAULT, Severity.ALARM], "faults come before alarms"
    seen = snapshot(card(0, xids(79)))
    reason = closed_devices(seen, (), ())["G0"]
    assert reason.kind is ReasonKind.UNHEALTHY
    assert "Xid 79" in reason.text
    assert "gpuyard devices clear" in reason.remedy, "the reason names the fault and the remedy"


@pytest.mark.parametrize("memory", [FixedMemory(2 * GB), WholeDevice(2 * GB)])
def test_a_faulty_device_gets_no_work_and_a_hot_one_last(memory: FixedMemory | WholeDevice) -> None:
    need = Need(memory=memory)
    hot = card(0, HealthFigures(throttle=(Throttle.HW_THERMAL,)))
    broken = card(1, HealthFigures(ecc_uncorrected=1))

    def place(*devices: Device) -> list[str]:
        seen = snapshot(*devices)
        choice = choose(need, Machine(now=0.0, snapshot=seen, closed=closed_devices(seen, (), ())))
        return [] if choice.claim is None else [share.device_id for share in choice.claim.shares]

    assert place(hot, broken, card(2)) == ["G2"]
    assert place(hot, broken) == ["G0"]
    assert place(broken) == []
