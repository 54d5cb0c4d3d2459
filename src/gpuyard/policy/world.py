"""World: everything that a plan is decided by, as one value without functions; and Plan, the answer of `decide` to it.

Of each lane the world has the first jobs only. A plan that would need more says so (`Plan.dry`), and is decided
again.
"""

from collections.abc import Mapping

from msgspec import Struct

from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import Claim, Holder, Need, Ticket
from gpuyard.policy.batch_pacing import PaceState
from gpuyard.policy.estimates import Estimate
from gpuyard.policy.machine import Machine
from gpuyard.policy.queue_order import Candidate, Lane, Party
from gpuyard.policy.wait_reasons import Reason


class RunningJob(Struct, frozen=True, kw_only=True):
    """A live attempt."""

    job_id: int
    user: str
    tag: str
    devices: int
    started_at: float
    suspended_s: float = 0.0  # how long it was suspended since
    group: int | None = None
    lease_id: str | None = None
    priority: int = 0
    preempt_cost_s: float | None = None  # the cost of preempting it; None where it may not be preempted
    frees_in_s: float = 0.0  # how long it takes until it has freed its memory
    shares_s: float = 0.0  # the same, as its part of the time in which several are moved side by side
    is_leaving: bool = False  # it is already being preempted
    takes_slot: bool = True  # it counts as a job without devices; false for runs of a batch and jobs on a cluster
    device_ids: tuple[str, ...] = ()
    ends_after: float | None = None  # its earliest end
    ends_about: float | None = None  # its likely end

    def ran_s(self, now: float) -> float:
        return now - self.started_at - self.suspended_s


class JobFacts(Struct, frozen=True, kw_only=True):
    """What is known about waiting jobs of one kind. `need`: None, if that of the lane; `power_w` is per GPU."""

    need: Need | None = None
    estimate: Estimate = Estimate()
    power_w: float | None = None


class WaitingLane(Struct, frozen=True, kw_only=True):
    """The first jobs of a lane, in order; with `has_more` others follow."""

    lane: Lane
    jobs: tuple[Candidate, ...]
    has_more: bool = False


class SchedulingLimits(Struct, frozen=True, kw_only=True):
    """How many jobs run at a time: without devices, and per tag."""

    cpu_jobs: int
    tags: dict[str, int] = {}


class StartCap(Struct, frozen=True, kw_only=True):
    """At most this many jobs (with `is_for_devices`, jobs with devices) start in one plan; others wait for `reason`."""

    most: int
    reason: Reason
    is_for_devices: bool = False


class PowerLimit(Struct, frozen=True, kw_only=True):
    """How much power all GPUs together may draw, and the draw per GPU of each running job, by its id; None: unknown."""

    limit_w: float
    running_w: Mapping[int, float | None]


_NO_FACTS = JobFacts()


class World(Struct, frozen=True, kw_only=True):
    now: float
    machine: Machine
    lanes: tuple[WaitingLane, ...] = ()
    facts: Mapping[int, JobFacts] = {}  # by the kind of a waiting job
    holder: Holder = Holder(uid=0, user="", pid=0)  # this queue, as it appears in the ledger
    limits: SchedulingLimits = SchedulingLimits(cpu_jobs=1)
    running: tuple[RunningJob, ...] = ()
    used: Mapping[Party, float] = {}  # recent use of each user and tag
    closed_reasons: tuple[Reason, ...] = ()  # why no job at all may start now
    start_caps: tuple[StartCap, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    my_ticket: Ticket | None = None  # this queue's own ticket in the ledger; `tickets` are those of others
    pace_states: Mapping[int, PaceState] = {}  # the state of each batch, by its group
    power: PowerLimit | None = None
    stopped_tags: frozenset[str] = frozenset()  # tags of which no job starts
    last_starts: Mapping[str, float] = {}  # when a job of a tag last started, for tags with sharing rules
    array_starts: Mapping[int, float] = {}  # when a job of an array last started, for staggered ones

    def facts_of(self, job: Candidate) -> JobFacts:
        return _NO_FACTS if job.kind is None else self.facts.get(job.kind, _NO_FACTS)


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
    dry: frozenset[int] = frozenset()  # lanes of which more jobs could start than the world has: decide again with more


class Explanation(Struct, frozen=True, kw_only=True):
    """Why a job waits: the reasons of the first job of its lane, `ahead` jobs before it. `world`: None on a cluster."""

    lane: int
    world: World | None

    reasons: tuple[Reason, ...]
    first_id: int
    ahead: int
    starts_at: float | None
