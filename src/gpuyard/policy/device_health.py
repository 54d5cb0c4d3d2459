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


XIDS = {
    46: ("the GPU stopped processing", Repair.RESET),
    48: ("uncorrectable ECC error (two bits)", Repair.RESET),
    62: ("the GPU's power controller halted", Repair.RESET),
    63: ("a row of its memory is to be remapped", Repair.WATCH),
    64: ("a row of its memory cannot be remapped", Repair.REPLACE),
    74: ("NVLink error", Repair.RESET),
    79: ("the GPU has fallen off the bus", Repair.REBOOT),
    92: ("many corrected ECC errors", Repair.WATCH),
    94: ("memory error that ended one program", Repair.RESET),
    95: ("memory error that affects all programs", Repair.RESET),
    110: ("security fault", Repair.RESET),
    119: ("the GPU's system processor (GSP) does not answer", Repair.RESET),
    120: ("the GPU's system processor (GSP) failed", Repair.RESET),
    136: ("link training failed", Repair.RESET),
    140: ("unrecovered ECC error", Repair.RESET),
    143: ("the GPU did not initialise", Repair.RESET),
    154: ("the driver asks for a reset or a restart", Repair.RESET),
}


class Severity(StrEnum):
    FAULT = "fault"
    ALARM = "alarm"


class HealthIssue(Struct, frozen=True, kw_only=True):
    """`since` is the wall time at which it was first seen, None if no daemon noted it. `remedy` is what to do."""

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
    marks, figures = [mark for mark in marks if mark.device_id == device.id], device.health or HealthFigures()
    cleared = max((mark for mark in marks if mark.accepted is not None), key=lambda mark: mark.since, default=None)
    accepted = (cleared and cleared.accepted) or HealthFigures()
    cleared_at = float("-inf") if cleared is None else cleared.since
    marks = [mark for mark in marks if mark.kind is not None and mark.since > cleared_at]
    found = [*_xids(marks, [(event.code, event.at) for event in figures.xids if event.at > cleared_at])]
    for kind, is_fault, text, remedy in _figures_beyond(figures, accepted, {mark.kind for mark in marks}):
        since = min((mark.since for mark in marks if mark.kind is kind), default=None)
        severity = Severity.FAULT if is_fault else Severity.ALARM
        found.append(HealthIssue(kind=kind, severity=severity, text=text, remedy=remedy, since=since))
    return tuple(sorted(found, key=lambda issue: (not issue.is_fault, issue.kind is not IssueKind.LOST)))


def _xids(marks: Sequence[HealthMark], events: Sequence[tuple[int, float]]) -> Iterator[HealthIssue]:
    first: dict[int, float] = {}
    seen = [(mark.xid, mark.since) for mark in marks if mark.xid is not None]
    for code, at in sorted([*seen, *events], key=lambda each: each[1]):
        first.setdefault(code, at)
    for code, at in first.items():
        if code in XIDS:
            meaning, repair = XIDS[code]
            severity = Severity.ALARM if repair is Repair.WATCH else Severity.FAULT
            text, remedy = f"Xid {code}, {meaning}", f"{repair}; {_CLEAR}"
            yield HealthIssue(kind=IssueKind.XID, severity=severity, text=text, remedy=remedy, since=at, xid=code)


_CLEAR = "then `gpuyard devices clear ID`"


def _figures_beyond(
    figures: HealthFigures, accepted: HealthFigures, marked: Collection[IssueKind | None]
) -> Iterator[tuple[IssueKind, bool, str, str]]:
    """Yield what figures say beyond those that a user has accepted: its kind, whether it is a fault, and what to do."""
    if figures.is_lost:
        yield IssueKind.LOST, True, "the driver has lost it", str(Repair.REBOOT)
    if figures.remap_failed and not accepted.remap_failed:
        yield IssueKind.REMAP_FAILED, True, "rows of its memory cannot be remapped", str(Repair.REPLACE)
    if figures.remap_pending and not accepted.remap_pending:
        yield IssueKind.REMAP_PENDING, True, "rows of its memory are remapped at the next reset", str(Repair.RESET)
    errors, before = figures.ecc_uncorrected or 0, accepted.ecc_uncorrected or 0
    new = errors if errors < before else errors - before
    if new:
        yield IssueKind.ECC, True, format_count(new, "uncorrectable ECC error"), f"{Repair.RESET}; {_CLEAR}"
    width = figures.link_width
    if figures.has_narrow_link and width is not None and (accepted.link_width is None or width < accepted.link_width):
        text = f"its PCIe link has {width} of {figures.link_width_max} lanes"
        remedy = "reseat the card; if its slot has no more lanes, `gpuyard devices clear ID` accepts that"
        yield IssueKind.LINK, IssueKind.LINK in marked, text, remedy
    if figures.throttle:
        remedy = "check its fans, the air flow and the power supply; it is used last until this ends"
        yield IssueKind.THROTTLED, False, f"throttled ({', '.join(figures.throttle)})", remedy
    if figures.unreleased_mb is not None and accepted.unreleased_mb is None:
        text = f"{format_size(figures.unreleased_mb)} stay in use although no process is left"
        remedy = "look for programs in containers or with a stuck driver call; a reset of the GPU frees it"
        yield IssueKind.UNRELEASED, False, text, remedy


def closed_devices(
    snapshot: Snapshot, drains: Sequence[Drain], banned: Collection[str], marks: Sequence[HealthMark] = ()
) -> dict[str, Reason]:
    """Return why nothing new starts on each closed device, by its id. What closes a card closes its parts."""
    # A lost device is no candidate anyway (`rules.UsableDevice`), and keeps the driver's own words as its reason.
    found = {
        each: Reason(ReasonKind.UNHEALTHY, describe_issue(fault), each, remedy=fault.remedy)
        for each, fault in first_faults(device_issues(snapshot, marks)).items()
        if fault.kind is not IssueKind.LOST
    }
    for device in snapshot.devices if drains or banned else ():
        drain, is_banned = drain_of(device, drains), device.id in banned or device.parent in banned
        if is_banned or drain is not None:
            text = "banned in the configuration" if is_banned or drain is None else describe_drain(drain)
            remedy = REMEDIES["banned" if is_banned else "drained"]
            found[device.id] = Reason(ReasonKind.CLOSED, text, device.id, remedy=remedy, is_leased=True)
    return found


def drain_of(device: Device, drains: Sequence[Drain]) -> Drain | None:
    """Return the drain that holds for the device, the oldest if there are several."""
    found = (drain for drain in drains if drain.device_id in (device.id, device.parent))
    return min(found, key=lambda drain: drain.since, default=None)


def describe_drain(drain: Drain) -> str:
    reason = f": {drain.reason}" if drain.reason else ""
    return f"drained by {drain.user} since {format_time(iso_time(drain.since))}{reason}"


def drain_notice(drain: Drain, label: str) -> str:
    return f"GPU {label} is {describe_drain(drain)}; `gpuyard devices undrain {label}` lets work start there"
