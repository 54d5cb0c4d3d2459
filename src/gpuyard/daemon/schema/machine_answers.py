"""The machine: its devices, what they did over time, what ran where; and the page that shows it."""

from typing import TypedDict

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.report.hourly import HourlyPicture
from gpuyard.core.report.totals import ReportTotals
from gpuyard.core.report.usage_report import DeviceTimeUse, DeviceUse
from gpuyard.core.snapshot import Host, Problem, Vendor
from gpuyard.daemon.schema.queue_answers import Iso
from gpuyard.store.report_queries import GroupBy

Series = list[float | None]


class MemoryBreakdown(TypedDict):
    """Own, others', foreign and free are all of it; what is used is a part of what is charged."""

    capacity_mb: float | None
    own_mb: float | None
    own_used_mb: float | None
    others_mb: float | None
    others_used_mb: float | None
    foreign_mb: float | None
    free_mb: float | None


class LeaseRow(TypedDict):
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


class DeviceRow(TypedDict):
    id: str
    index: int | None
    vendor: Vendor
    name: str | None
    parent: str | None
    pci_bus_id: str | None
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_free_mb: float | None
    utilization_percent: float | None
    power_draw_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    fault: str | None
    healthy: bool
    is_usable: bool
    memory: MemoryBreakdown
    leases: list[LeaseRow]


class Devices(TypedDict):
    taken_at: Iso | None
    host: Host
    problems: list[Problem]
    devices: list[DeviceRow]


class DeviceHistory(TypedDict):
    at: list[float]
    own_mb: Series
    others_mb: Series
    foreign_mb: Series
    used_mb: Series
    utilization_percent: Series
    power_w: Series


class HostHistory(TypedDict):
    at: list[float]
    cpu_percent: Series
    memory_used_mb: Series


class History(TypedDict):
    span_s: float
    step_s: float
    devices: dict[str, DeviceHistory]
    host: HostHistory


class Lane(TypedDict):
    device: str | None
    label: str
    name: str | None
    rows: int


# `from` is a word of Python's.
Stretch = TypedDict(
    "Stretch",
    {
        "job": int,
        "attempt": int,
        "name": str | None,
        "command": str,
        "user": str,
        "lane": int,
        "row": int,
        "from": float,
        "until": float | None,
        "state": str,  # of the job where it still runs, else "ended"
        "outcome": OutcomeKind | None,
        "suspended": list[tuple[float, float | None]],
        "reserved_mb": float | None,
    },
)
Timeline = TypedDict(
    "Timeline",
    {"from": float, "until": float, "lanes": list[Lane], "stretches": list[Stretch], "left_out": int},
)


# A report


class ReportGroup(ReportTotals, frozen=True, kw_only=True):
    """Without a name it is the rest, so many groups together."""

    group: str | None
    groups: int


class Report(TypedDict):
    since: Iso
    until: Iso
    by: GroupBy
    host: str | None
    total: ReportTotals
    groups: list[ReportGroup]
    devices: list[DeviceUse]
    box: DeviceTimeUse
    picture: HourlyPicture


# The page


class PageStanding(TypedDict):
    """All unknown where it is not served."""

    url: str | None
    address: str | None
    port: int | None
    read_only: bool | None
    notes: list[str]


class PageStopped(TypedDict):
    """Whether it was served."""

    stopped: bool


class Session(TypedDict):
    read_only: bool
    user: str
    host: str
