"""Answers about the machine: its devices and their usage over time, the timeline, the report, the summary of a night,
and the web page.
"""

from typing import Annotated

from msgspec import Meta, Struct, field

from gpuyard.model.energy import EnergyTotals
from gpuyard.model.job import OutcomeKind
from gpuyard.model.lease import Drain
from gpuyard.model.machine_snapshot import HealthFigures, Host, IssueKind, Problem, Vendor, iso_time
from gpuyard.policy.device_health import HealthIssue, Severity
from gpuyard.policy.device_state import MemoryParts
from gpuyard.policy.host_room import HostReserved
from gpuyard.report.failure_causes import FailureCause, JobsNow
from gpuyard.report.usage_report import GroupBy, UsageReport
from gpuyard.schema.queue import Iso

Series = list[float | None]


class LeaseRow(Struct, frozen=True, kw_only=True):
    id: str
    who: str
    user: str
    pid: int
    job: int | None
    is_own: bool
    is_exclusive: bool
    reserved_mb: float | None
    measured_mb: float | None
    since: float


class DrainRow(Struct, frozen=True, kw_only=True):
    """A drain of a device, or of the card that it is a part of: nothing new starts there."""

    device_id: str
    user: str
    since: Iso
    reason: str


def drain_row(drain: Drain) -> DrainRow:
    return DrainRow(device_id=drain.device_id, user=drain.user, since=iso_time(drain.since), reason=drain.reason)


class DrainResult(Struct, frozen=True, kw_only=True):
    """The ids of the devices, and all drains that hold now."""

    devices: list[str]
    drains: list[DrainRow]


class IssueRow(Struct, frozen=True, kw_only=True):
    """Something that is wrong with a device. A fault keeps new work away; an alarm makes the device the last choice.
    `since` is unknown where no daemon has watched the device."""

    kind: IssueKind
    severity: Severity
    text: str
    since: Iso | None
    remedy: str


def issue_row(issue: HealthIssue) -> IssueRow:
    since = iso_time(issue.since)
    return IssueRow(kind=issue.kind, severity=issue.severity, text=issue.text, since=since, remedy=issue.remedy)


class ClearResult(Struct, frozen=True, kw_only=True):
    """The ids of the devices that were cleared."""

    devices: list[str]


class DeviceRow(Struct, frozen=True, kw_only=True):
    """`numa_node` is None where it is unknown. `linked_to` are the labels of the devices that NVLink or XGMI joins to
    this one, as far as links are known."""

    id: str
    index: int | None
    label: str | None
    vendor: Vendor
    is_integrated: bool
    name: str | None
    parent: str | None
    pci_bus_id: str | None
    numa_node: int | None
    linked_to: list[str]
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_used_at_least_mb: float | None
    memory_free_mb: float | None
    utilization_percent: float | None
    power_draw_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    temperature_c: float | None
    fault: str | None
    healthy: bool
    is_usable: bool
    banned: bool
    drain: DrainRow | None
    health: HealthFigures | None
    issues: list[IssueRow]
    memory: MemoryParts
    leases: list[LeaseRow]


class DiskRow(Struct, frozen=True, kw_only=True):
    """A disk of the queue (`what` is "state" or "logs"), or one that jobs write to ("output"). No job that needs it
    starts while less than `min_free_mb` is free; 0: no limit."""

    what: str
    folder: str
    free_mb: float | None
    total_mb: float | None
    min_free_mb: float


class MachineState(Struct, frozen=True, kw_only=True):
    taken_at: Iso | None
    host: Host
    host_reserved: HostReserved
    problems: tuple[Problem, ...]
    devices: list[DeviceRow]
    disks: list[DiskRow]


class DeviceSeries(Struct, frozen=True, kw_only=True):
    """One value per time in `at`; None where nothing was measured."""

    at: list[float]
    own_mb: Series
    others_mb: Series
    foreign_mb: Series
    used_mb: Series
    utilization_percent: Series
    power_w: Series


class HostSeries(Struct, frozen=True, kw_only=True):
    at: list[float]
    cpu_percent: Series
    memory_used_mb: Series


class DeviceHistory(Struct, frozen=True, kw_only=True):
    span_s: float
    step_s: float
    devices: dict[str, DeviceSeries]
    host: HostSeries


class LaneRow(Struct, frozen=True, kw_only=True):
    """A device, the CPU, or an engine elsewhere; `rows` is the most jobs that ran there side by side."""

    device: str | None
    label: str
    name: str | None
    rows: int


class TimelineRun(Struct, frozen=True, kw_only=True):
    """One attempt in one lane. `state` is the job's while the attempt runs, else "ended"."""

    job: int
    attempt: int
    name: str | None
    command: str
    user: str
    lane: int = 0
    row: int = 0
    since: float = field(name="from")
    until: float | None
    state: str
    outcome: OutcomeKind | None
    suspended: list[tuple[float, float | None]]
    reserved_mb: float | None


class JobTimeline(Struct, frozen=True, kw_only=True):
    """`left_out` is the number of runs beyond the limit."""

    since: float = field(name="from")
    until: float
    lanes: list[LaneRow]
    stretches: list[TimelineRun]
    left_out: int


class ReportAnswer(UsageReport, frozen=True, kw_only=True):
    since: Iso
    until: Iso
    by: GroupBy
    host: str | None


class PageState(Struct, frozen=True, kw_only=True):
    """Where the web page is served; all None while it is not."""

    url: str | None = None
    address: str | None = None
    port: int | None = None
    read_only: bool | None = None
    notes: list[str] = []


class PageStopResult(Struct, frozen=True, kw_only=True):
    """`stopped`: the page was being served."""

    stopped: bool


class PageSession(Struct, frozen=True, kw_only=True):
    read_only: bool
    user: str
    host: str


class SummaryQuery(Struct, frozen=True, kw_only=True):
    since: Annotated[
        str,
        Meta(
            description="the time of day, date or time ago that it begins at, such as 22:00, 2026-11-18T22:00 or 8h; "
            "default: the last 18:00 that was at least 6 h ago"
        ),
    ] = ""


class QueueSummary(Struct, frozen=True, kw_only=True):
    """`succeeded`, `failed`, `rejected` and `cancelled` count jobs that ended since then, and are still so.
    `failed_ids` are the failed ones, such as `3-5 9`, which `causes` counts by cause. `energy` is that of the
    `gpu_hours` since then, with what it cost where a price is configured. `unbrought` has a line for each snapshot with
    results that could not be brought back to the tree."""

    since: Iso
    until: Iso
    host: str | None
    succeeded: int
    failed: int
    rejected: int
    cancelled: int
    failed_ids: str
    causes: list[FailureCause]
    now: JobsNow
    gpu_hours: float
    energy: EnergyTotals
    unbrought: list[str]
