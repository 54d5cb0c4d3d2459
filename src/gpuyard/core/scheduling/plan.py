"""The input and output of the planner: PlannerView and Plan."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import Claim, Holder, Need, Ticket
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.scheduling.batch_pacing import PaceState
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.power_limit import PowerLimit
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import Lane, LaneQueue, Party
from gpuyard.core.scheduling.wait_reasons import Reason


class SchedulingLimits(Struct, frozen=True, kw_only=True):
    """How many jobs run at a time: without devices, and per tag."""

    cpu_jobs: int
    tags: dict[str, int] = {}


class StartCap(Struct, frozen=True, kw_only=True):
    """At most this many jobs may start in one plan; with `is_for_devices`, jobs that need devices. Others wait for
    `reason`."""

    most: int
    reason: Reason
    is_for_devices: bool = False


class PlannerView(Struct, frozen=True, kw_only=True):
    """All input of a plan. The functions are called only where their result matters."""

    now: float
    placement: PlacementView
    queues: Sequence[LaneQueue]
    holder: Holder  # this queue, as it appears in the ledger
    limits: SchedulingLimits
    running: Sequence[RunningJob] = ()
    used: Mapping[Party, float] = {}
    closed_reasons: tuple[Reason, ...] = ()  # why no job at all may start now
    start_caps: tuple[StartCap, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    my_ticket: Ticket | None = None  # this queue's own ticket in the ledger; `tickets` are those of others
    estimate: Callable[[int], Estimate] = lambda _: Estimate()  # how long a job takes
    ends_after: Callable[[int], float | None] = lambda _: None  # the earliest end of a running job
    ends_about: Callable[[int], float | None] = lambda _: None  # the likely end of a running job
    need: Callable[[Lane, int], Need] = lambda lane, _: lane.need  # the need of a job in a lane that sizes each
    kind: Callable[[int], int | None] = lambda _: None  # equal for jobs of equal need and duration, in such a lane
    pace_states: Mapping[int, PaceState] = {}  # the state of each batch, by its group
    power: PowerLimit | None = None
    disk_refusals: Callable[[int], tuple[Reason, ...]] = lambda _: ()  # of jobs that write to disks of their own
    stopped_tags: frozenset[str] = frozenset()  # tags of which no job starts
    last_starts: Mapping[str, float] = {}  # when a job of a tag last started, for tags with sharing rules
    array_starts: Mapping[int, float] = {}  # when a job of an array last started, for staggered ones


class Start(Struct, frozen=True, kw_only=True):
    """A proposed start (in a lane that resumes: a resume). The ledger grants its claim, or the job keeps waiting."""

    job_id: int
    lane: Lane
    claim: Claim
    need: Need | None = None  # what the claim is for; None for a job on a cluster
    charged_mb: float | None = None  # of a run of a batch: memory used and reserved on its device, including the run
    terms: ClusterTerms | None = None  # for a job on a cluster, what is asked of the cluster instead of a claim


def planned_lease_id(job_id: int) -> str:
    """Return the name that stands for the lease of a job until the ledger grants one."""
    return f"job {job_id}"


class WaitingJob(Struct, frozen=True, kw_only=True):
    job_id: int
    lane: Lane
    need: Need
    reasons: tuple[Reason, ...]


class Preempt(Struct, frozen=True, kw_only=True):
    job_id: int
    for_job: int


class Plan(Struct, frozen=True, kw_only=True):
    starts: tuple[Start, ...] = ()
    waiting: tuple[WaitingJob, ...] = ()  # the first job of each lane that was considered and did not start
    preempts: tuple[Preempt, ...] = ()
    head: WaitingJob | None = None  # has devices, RAM or CPUs reserved; else the first that waits for devices


class Explanation(Struct, frozen=True, kw_only=True):
    """Why a job waits. `reasons` are those of the first job of its lane, `first_id`; `ahead` jobs of the lane come
    before it."""

    reasons: tuple[Reason, ...]
    first_id: int
    ahead: int
    starts_at: float | None
