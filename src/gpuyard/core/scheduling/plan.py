"""The input and output of the planner: PlannerView and Plan."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import Claim, Holder, Need, Ticket
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.scheduling.batch_pacing import PaceState
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import Lane, LaneQueue, Party
from gpuyard.core.scheduling.wait_reasons import Reason


class SchedulingLimits(Struct, frozen=True, kw_only=True):
    """How many jobs run at a time: without devices, and per tag."""

    cpu_jobs: int
    tags: dict[str, int] = {}


class PlannerView(Struct, frozen=True, kw_only=True):
    """All input of a plan. The functions are called only where their result matters.

    holder: this queue, as it appears in the ledger.
    closed_reasons: why no job at all may start now.
    my_ticket: this queue's own ticket in the ledger; `tickets` are those of others.
    estimate: how long a job takes.
    ends_after, ends_about: the earliest and the likely end of a running job.
    need: the need of a job in a lane that sizes each.
    pace_states: the state of each batch, by its group.
    stopped_tags: tags of which no job starts.
    last_starts: when a job of a tag last started, for tags with sharing rules.
    """

    now: float
    placement: PlacementView
    queues: Sequence[LaneQueue]
    holder: Holder
    limits: SchedulingLimits
    running: Sequence[RunningJob] = ()
    used: Mapping[Party, float] = {}
    closed_reasons: tuple[Reason, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    my_ticket: Ticket | None = None
    estimate: Callable[[int], Estimate] = lambda _: Estimate()
    ends_after: Callable[[int], float | None] = lambda _: None
    ends_about: Callable[[int], float | None] = lambda _: None
    need: Callable[[Lane, int], Need] = lambda lane, _: lane.need
    pace_states: Mapping[int, PaceState] = {}
    stopped_tags: frozenset[str] = frozenset()
    last_starts: Mapping[str, float] = {}


class Start(Struct, frozen=True, kw_only=True):
    """A proposed start: the ledger grants its claim, or the job keeps waiting. In a lane that resumes, the job resumes.

    charged_mb: for a run of a batch, the memory that is used and reserved on its device, including the run.
    terms: for a job on a cluster, what is asked of the cluster instead of a claim.
    """

    job_id: int
    lane: Lane
    claim: Claim
    charged_mb: float | None = None
    terms: ClusterTerms | None = None


class WaitingJob(Struct, frozen=True, kw_only=True):
    """A job that does not start, and why."""

    job_id: int
    lane: Lane
    need: Need
    reasons: tuple[Reason, ...]


class Preempt(Struct, frozen=True, kw_only=True):
    """A running job to preempt for another."""

    job_id: int
    for_job: int


class Plan(Struct, frozen=True, kw_only=True):
    """`waiting` has the first job of each lane that was considered and did not start.

    `head` is the head of the queue, which has devices reserved; without one, the first job that waits for devices.
    """

    starts: tuple[Start, ...] = ()
    waiting: tuple[WaitingJob, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    head: WaitingJob | None = None


def planned_lease_id(job_id: int) -> str:
    """Return the name that stands for the lease of a job until the ledger grants one."""
    return f"job {job_id}"
