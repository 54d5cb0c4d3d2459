"""Whether a device is healthy, and which devices get no new work: drained, banned or faulty ones.

A fault closes a device, an alarm makes it the last choice. A figure that is back to normal ends its issue; an Xid holds
until a user clears the device. What is wrong with a card is wrong with its parts.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from gpuyard.model.lease import Drain
from gpuyard.model.machine_snapshot import Device, HealthFigures, HealthMark, IssueKind, Snapshot, iso_time
from gpuyard.model.units import format_count, format_size, format_time
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind


class Repair(StrEnum):
    """What to do before the device is used again."""

    WATCH = "nothing yet; if it comes again, replace the card"
    RESET = "wait until no program uses the GPU, then reset it: `sudo nvidia-smi --gpu-reset -i ID`"
    REBOOT = "restart the machine; if it comes again, reseat the card and check its power"
    REPLACE = "reset it: `sudo nvidia-smi --gpu-reset -i ID`; if it comes again, replace the card"


class XidMeaning(Struct, frozen=True):
    text: str
    repair: Repair

    @property
    def is_fault(self) -> bool:
        return self.repair is not Repair.WATCH


XIDS = {
    46: XidMeaning("the GPU stopped processing", Repair.RESET),
    48: XidMeaning("uncorrectable ECC error (two bits)", Repair.RESET),
    62: XidMeaning("the GPU's power controller halted", Repair.RESET),
    63: XidMeaning("a row of its memory is to be remapped", Repair.WATCH),
    64: XidMeaning("a row of its memory cannot be remapped", Repair.REPLACE),
    74: XidMeaning("NVLink error", Repair.RESET),
    79: XidMeaning("the GPU has fallen off the bus", Repair.REBOOT),
    92: XidMeaning("many corrected ECC errors", Repair.WATCH),
    94: XidMeaning("memory error that ended one program", Repair.RESET),
    95: XidMeaning("memory error that affects all programs", Repair.RESET),
    110: XidMeaning("security fault", Repair.RESET),
    119: XidMeaning("the GPU's system processor (GSP) does not answer", Repair.RESET),
    120: XidMeaning("the GPU's system processor (GSP) failed", Repair.RESET),
    136: XidMeaning("link training failed", Repair.RESET),
    140: XidMeaning("unrecovered ECC error", Repair.RESET),
    143: XidMeaning("the GPU did not initialise", Repair.RESET),
    154: XidMeaning("the driver asks for a reset or a restart", Repair.RESET),
}

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


def closed_devices(
    snapshot: Snapshot, drains: Sequence[Drain], banned: Collection[str], marks: Sequence[HealthMark] = ()
) -> dict[str, Reason]:
    """Return why nothing new starts on each closed device, by its id. What closes a card closes its parts."""
    faults = first_faults(device_issues(snapshot, marks))
    # A lost device is no candidate anyway (`rules.UsableDevice`), and keeps the driver's own words as its reason.
    found = {each: _faulty(each, fault) for each, fault in faults.items() if fault.kind is not IssueKind.LOST}
    if not drains and not banned:
        return found
    for device in snapshot.devices:
        drain = drain_of(device, drains)
        if device.id in banned or device.parent in banned:
            found[device.id] = _reason("banned", "banned in the configuration", device)
        elif drain is not None:
            found[device.id] = _reason("drained", describe_drain(drain), device)
    return found


def _faulty(device_id: str, fault: HealthIssue) -> Reason:
    # No drain: a new measurement may show that the fault is over.
    return Reason(ReasonKind.UNHEALTHY, describe_issue(fault), device_id, remedy=fault.remedy)


def _reason(why: str, text: str, device: Device) -> Reason:
    return Reason(ReasonKind.CLOSED, text, device.id, remedy=REMEDIES[why], is_leased=True)


def drain_of(device: Device, drains: Sequence[Drain]) -> Drain | None:
    """Return the drain that holds for the device, the oldest if there are several."""
    found = (drain for drain in drains if drain.device_id in (device.id, device.parent))
    return min(found, key=lambda drain: drain.since, default=None)


def describe_drain(drain: Drain) -> str:
    reason = f": {drain.reason}" if drain.reason else ""
    return f"drained by {drain.user} since {format_time(iso_time(drain.since))}{reason}"


def drain_notice(drain: Drain, label: str) -> str:
    return f"GPU {label} is {describe_drain(drain)}; `gpuyard devices undrain {label}` lets work start there"
