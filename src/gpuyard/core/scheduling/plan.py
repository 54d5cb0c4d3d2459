"""Plan: what `planner.decide` answers to a world (`world.World`)."""

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import Claim, Need
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.scheduling.world import World


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
    """Why a job waits. `reasons` are those of the first job of its lane, `first_id`; `ahead` jobs of the lane come
    before it. `world`: what the plan followed from; None for a job of a cluster."""

    lane: int
    world: World | None

    reasons: tuple[Reason, ...]
    first_id: int
    ahead: int
    starts_at: float | None
