"""Whether a device is healthy: a fault closes it for new work, an alarm makes it the last choice.

Faults: an Xid of the card, uncorrectable ECC errors, rows of memory that are to be remapped or cannot be, a device that
the driver calls lost, a PCIe link that lost lanes while we watched.
Alarms: throttling by heat or power brake, memory that stays in use without a process, a PCIe link narrower than it
could be (some slots are wired so), an Xid that needs nothing yet.

- A figure that is back to normal ends its issue. An Xid is an event: it holds until a user clears the device.
- Clearing accepts the figures of that moment. What is worse than those is an issue again; a counter below them was
  reset with the driver, and counts from zero.
- What is wrong with a card is wrong with its parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from gpuyard.core.health_figures import HealthFigures, HealthMark, IssueKind
from gpuyard.core.scheduling.xid_codes import XIDS, Repair
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import format_count, format_size, format_time

_COOL = "check its fans, the air flow and the power supply; it is used last until this ends"
_RESEAT = "reseat the card; if its slot has no more lanes, `gpuyard devices clear ID` accepts that"
_HELD = "look for programs in containers or with a stuck driver call; a reset of the GPU frees it"


class Severity(StrEnum):
    FAULT = "fault"
    ALARM = "alarm"


class HealthIssue(Struct, frozen=True, kw_only=True):
    """`since` is the wall time at which it was first seen, None if no daemon noted it. `remedy` is what to do; `xid` is
    the number of an Xid."""

    kind: IssueKind
    severity: Severity
    text: str
    remedy: str
    since: float | None = None
    xid: int | None = None

    @property
    def is_fault(self) -> bool:
        return self.severity is Severity.FAULT


def device_issues(snapshot: Snapshot, marks: Sequence[HealthMark]) -> dict[str, tuple[HealthIssue, ...]]:
    """Return what is wrong with each device that is not healthy, by its id; faults come first."""
    marked = {mark.device_id for mark in marks}
    found: dict[str, tuple[HealthIssue, ...]] = {}
    for device in snapshot.devices:
        if device.parent is None and (device.health is not None or device.id in marked):
            found[device.id] = find_issues(device, marks)
    for device in snapshot.devices:
        if device.parent in found:
            found[device.id] = found[device.parent]
    return {device_id: issues for device_id, issues in found.items() if issues}


def first_faults(issues: Mapping[str, Sequence[HealthIssue]]) -> dict[str, HealthIssue]:
    """Return the first fault of each device that has one."""
    return {device_id: each[0] for device_id, each in issues.items() if each[0].is_fault}


def describe_issue(issue: HealthIssue) -> str:
    since = f" since {format_time(iso_time(issue.since))}" if issue.since is not None else ""
    state = "faulty" if issue.is_fault else "used last"
    return f"{state}{since}: {issue.text}"


def find_issues(device: Device, marks: Sequence[HealthMark]) -> tuple[HealthIssue, ...]:
    """Return what is wrong with a card, faults first. `marks` may be of other devices too."""
    judge = _Judge(device, [mark for mark in marks if mark.device_id == device.id])
    return tuple(sorted(judge.issues(), key=lambda issue: not issue.is_fault))


class _Judge:
    def __init__(self, device: Device, marks: Sequence[HealthMark]) -> None:
        self._figures = device.health or HealthFigures()
        cleared = max((mark for mark in marks if mark.accepted is not None), key=lambda mark: mark.since, default=None)
        self._accepted = HealthFigures() if cleared is None or cleared.accepted is None else cleared.accepted
        self._cleared_at = float("-inf") if cleared is None else cleared.since
        self._marks = [mark for mark in marks if mark.kind is not None and mark.since > self._cleared_at]

    def issues(self) -> Iterator[HealthIssue]:
        if self._figures.is_lost:
            yield self._issue(IssueKind.LOST, Severity.FAULT, "the driver has lost it", Repair.REBOOT)
        yield from self._xids()
        yield from self._memory_errors()
        yield from self._link()
        figures = self._figures
        if figures.throttle:
            text = f"throttled ({', '.join(figures.throttle)})"
            yield self._issue(IssueKind.THROTTLED, Severity.ALARM, text, _COOL)
        if figures.unreleased_mb is not None and self._accepted.unreleased_mb is None:
            text = f"{format_size(figures.unreleased_mb)} stay in use although no process is left"
            yield self._issue(IssueKind.UNRELEASED, Severity.ALARM, text, _HELD)

    def _xids(self) -> Iterator[HealthIssue]:
        seen = [(mark.xid, mark.since) for mark in self._marks if mark.xid is not None]
        seen += [(event.code, event.at) for event in self._figures.xids if event.at > self._cleared_at]
        first: dict[int, float] = {}
        for code, at in sorted(seen, key=lambda each: each[1]):
            first.setdefault(code, at)
        for code, at in first.items():
            if (meaning := XIDS.get(code)) is not None:
                severity = Severity.FAULT if meaning.is_fault else Severity.ALARM
                text, remedy = f"Xid {code}, {meaning.text}", _then_clear(meaning.repair)
                yield HealthIssue(kind=IssueKind.XID, severity=severity, text=text, remedy=remedy, since=at, xid=code)

    def _memory_errors(self) -> Iterator[HealthIssue]:
        figures, accepted = self._figures, self._accepted
        if figures.remap_failed and not accepted.remap_failed:
            text = "rows of its memory cannot be remapped"
            yield self._issue(IssueKind.REMAP_FAILED, Severity.FAULT, text, Repair.REPLACE)
        if figures.remap_pending and not accepted.remap_pending:
            text = "rows of its memory are remapped at the next reset"
            yield self._issue(IssueKind.REMAP_PENDING, Severity.FAULT, text, Repair.RESET)
        errors, before = figures.ecc_uncorrected or 0, accepted.ecc_uncorrected or 0
        new = errors if errors < before else errors - before
        if new:
            text = format_count(new, "uncorrectable ECC error")
            yield self._issue(IssueKind.ECC, Severity.FAULT, text, _then_clear(Repair.RESET))

    def _link(self) -> Iterator[HealthIssue]:
        figures, accepted = self._figures, self._accepted.link_width
        width = figures.link_width
        if not figures.has_narrow_link or width is None or (accepted is not None and width >= accepted):
            return
        is_loss = any(mark.kind is IssueKind.LINK for mark in self._marks)
        text = f"its PCIe link has {width} of {figures.link_width_max} lanes"
        yield self._issue(IssueKind.LINK, Severity.FAULT if is_loss else Severity.ALARM, text, _RESEAT)

    def _issue(self, kind: IssueKind, severity: Severity, text: str, remedy: str) -> HealthIssue:
        times = [mark.since for mark in self._marks if mark.kind is kind]
        return HealthIssue(kind=kind, severity=severity, text=text, remedy=str(remedy), since=min(times, default=None))


def _then_clear(repair: Repair) -> str:
    return f"{repair}; then `gpuyard devices clear ID`"
