"""Answers about the queue as a whole, about many jobs of one submission, and about learned estimates; the results of
submitting, changing and waiting for jobs.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gpuyard.errors import CODES
from gpuyard.model.job import OutcomeKind
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.estimates import FLAT_S, KEPT_DURATIONS, KEPT_PEAKS, ProfileKind
from gpuyard.policy.numbers import KEPT_HOST_USES

# A time in coordinated universal time, such as 2026-11-15T04:04:12.623Z.
Iso = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class ErrorBody(Struct, frozen=True, kw_only=True):
    """What went wrong, and what to try next."""

    error: str
    hint: str | None = None
    code: Annotated[str, Meta(extra_json_schema={"enum": list(CODES)})]


class QueueState(Struct, frozen=True, kw_only=True):
    """`counts` is the number of jobs in each state. `notices` are for people: what is wrong with the queue as a whole,
    and what to do about it."""

    paused: bool
    draining: bool
    counts: dict[str, int]
    notices: list[str]


class KeptFiles(Struct, frozen=True, kw_only=True):
    """What the queue keeps: the size of its database and of all logs, as of the last round of cleaning (null before
    the first); and the limits of `[keep]`, null where there is none."""

    database_bytes: int
    logs: int | None
    log_bytes: int | None
    keep_jobs_s: float | None
    keep_logs_s: float | None
    keep_log_bytes: int | None


class DaemonStatus(QueueState, frozen=True, kw_only=True):
    """`managed`: a service manager or a terminal runs the daemon in the foreground. `under_way` counts jobs that have
    begun, without those that a user suspended; `viewers` the open event streams. `step_us` is the duration of the last
    scheduling step in microseconds."""

    pid: int
    version: str
    managed: bool
    started_at: Iso
    uptime_s: float
    socket: str
    state_dir: str
    under_way: int
    viewers: int
    step_us: float | None
    kept: KeptFiles


class PauseResult(QueueState, frozen=True, kw_only=True):
    """`running` counts jobs that have begun, without those that a user suspended."""

    running: int


class StopResult(Struct, frozen=True, kw_only=True):
    stopping: bool
    running: int


class SubmitResult(Struct, frozen=True, kw_only=True):
    """`ids` is `"17"` or `"18-117"`."""

    ids: str
    first: int
    last: int
    count: int
    notes: list[str]


class UnchangedJob(Struct, frozen=True, kw_only=True):
    """`variables` are those that it lacks, because gpuyard keeps no secrets of jobs that have ended."""

    id: int
    state: JobState
    reason: str
    variables: tuple[str, ...] = ()


class LackingJobs(Struct, frozen=True, kw_only=True):
    """Jobs that a request with the values of these variables would change."""

    ids: str
    count: int
    variables: list[str]


class ChangeSummary(Struct, frozen=True, kw_only=True):
    """`changed` lists ids such as `"17-20"`; `unchanged` has at most 100 jobs, `unchanged_count` the number of all.
    `revived` lists jobs that had been skipped because of jobs that are retried, and wait again. `lacking` are those of
    the unchanged jobs that lack values of variables. `left_alone` counts, by state, the finished jobs that a retry of
    what failed did not run again."""

    changed: str
    count: int
    unchanged: list[UnchangedJob]
    unchanged_count: int
    revived: str = ""
    revived_count: int = 0
    lacking: LackingJobs | None = None
    left_alone: dict[str, int] = {}


class UnsuccessfulJob(Struct, frozen=True, kw_only=True):
    id: int
    state: JobState
    outcome: OutcomeKind | None
    reason: str | None


class StuckJob(Struct, frozen=True, kw_only=True):
    """A job that nothing will start: `reason` says what a user has to do."""

    id: int
    state: JobState
    reason: str


class WaitResult(Struct, frozen=True, kw_only=True):
    """`selection` names the jobs that are waited for, and `chosen_by` says how they were chosen: by their ids, as the
    jobs of the shell that asks, or as all jobs that were unfinished. `succeeded`, `failed` and `failed_count` are
    filled in once `done` or `is_stuck` is true; `failed` and `stuck` list at most 100 jobs. `is_stuck`: all jobs that
    are left are held, suspended by a user, or wait for such jobs."""

    done: bool
    left: int
    running: int
    selection: str
    succeeded: int | None = None
    failed: list[UnsuccessfulJob] = []
    failed_count: int | None = None
    chosen_by: Literal["ids", "shell", "all"] = "ids"
    is_stuck: bool = False
    stuck: list[StuckJob] = []
    stuck_count: int = 0


class ReportedResult(Struct, frozen=True, kw_only=True):
    """`known`: one of the processes has submitted jobs."""

    known: bool


class CleanResult(Struct, frozen=True, kw_only=True):
    """The number of jobs and of logs that were removed, and the size of these logs on disk."""

    jobs: int
    logs: int
    bytes: int


class TagState(Struct, frozen=True, kw_only=True):
    tag: str
    stopped: bool


class PreviewedJob(Struct, frozen=True, kw_only=True):
    """`values` are those of its placeholders."""

    command: str
    index: int | None
    values: dict[str, str]


class SubmissionPreview(Struct, frozen=True, kw_only=True):
    """What would be submitted: `count` jobs, of which `jobs` has the first 1,000. `varies` are the names of the values
    that differ between them."""

    count: int
    varies: tuple[str, ...]
    jobs: list[PreviewedJob]
    notes: list[str]


class GroupProgress(Struct, frozen=True, kw_only=True):
    """The jobs of a sweep or an array: their ids, such as `"17-56"`, how many there are in which state, and the same as
    a text, such as `12/40 done, 2 failed, 4 running`."""

    ids: str
    first: int
    last: int
    count: int
    counts: dict[str, int]
    text: str


class SweepColumn(Struct, frozen=True, kw_only=True):
    """A column of the table of a sweep. `kind` is how its cells are shown: text, seconds or figure."""

    name: str
    title: str
    kind: str


class EstimateRow(Struct, frozen=True, kw_only=True):
    """What past runs of a command, of a program with any arguments, or first runs of any program have taught."""

    fingerprint: str
    label: str
    kind: ProfileKind
    runs: int
    measured_runs: int
    memory_mb: float | None
    peak_mb: float | None
    floor_mb: float | None
    ram_mb: float | None
    cpus_used: float | None
    load_percent: float | None
    power_w: float | None
    least_s: float | None
    mean_s: float | None
    most_s: float | None
    predicted_mb: float | None
    actual_mb: float | None
    off_percent: float | None
    seen_at: Iso | None


class EstimateList(Struct, frozen=True, kw_only=True):
    """`more`: there are estimates beyond the limit."""

    estimates: list[EstimateRow]
    more: bool


Amount = Annotated[float, Meta(ge=0, le=1e12)]


class LearnedProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An estimate as it is exported: `runs` successful runs, the durations of the last ones, their peaks on one device,
    and `floor_mb`, memory that was not enough. `kind` is command, program or machine. `climb` is what was missing of
    the peak once memory had been flat for 1, 2, 4, … seconds: count, sum and sum of squares of the parts. With
    `preallocates`, this framework took most of a device at once in these runs. `ram_peaks_mb` and `cpu_uses` are of the
    last runs."""

    fingerprint: Annotated[str, Meta(min_length=24, max_length=24)]
    kind: ProfileKind
    label: Annotated[str, Meta(max_length=1000)]
    runs: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    durations_s: Annotated[list[Amount], Meta(max_length=KEPT_DURATIONS)] = []
    peaks_mb: Annotated[list[Amount], Meta(max_length=KEPT_PEAKS)] = []
    climb: Annotated[list[Annotated[list[Amount], Meta(min_length=3, max_length=3)]], Meta(max_length=len(FLAT_S))] = []
    floor_mb: Amount | None = None
    ram_mb: Amount | None = None
    ram_peaks_mb: Annotated[list[Amount], Meta(max_length=KEPT_HOST_USES)] = []
    cpu_uses: Annotated[list[Amount], Meta(max_length=KEPT_HOST_USES)] = []
    load_percent: Amount | None = None
    power_w: Amount | None = None
    preallocates: Annotated[str, Meta(max_length=20)] = ""
    seen_at: Iso


class ProfilePage(Struct, frozen=True, kw_only=True):
    """`next` is the `after` of the next page, null on the last one."""

    estimates: list[LearnedProfile]
    next: str | None


class ImportResult(Struct, frozen=True, kw_only=True):
    """`kept` counts estimates that were learned here, and stay."""

    imported: int
    kept: int


class ForgetResult(Struct, frozen=True, kw_only=True):
    forgotten: int
