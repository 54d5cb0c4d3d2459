"""The seams between what decides and what touches the world, as Protocols."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms, Offer
from gpuyard.core.job.job import Attempt, Outcome, Usage
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.lease import Claim, Lease, Need, Ticket
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.snapshot import Host, Reading, Snapshot, Vendor


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, for people."""

    def monotonic(self) -> float:
        """Seconds that never go back, for measuring."""

    def sleep(self, seconds: float) -> None: ...


class Probe(Protocol):
    """One way of reading one vendor's devices, such as NVML or `nvidia-smi`."""

    @property
    def name(self) -> str:
        """The tool or library, as problems and `gpuyard doctor` call it."""

    @property
    def vendor(self) -> Vendor: ...

    @property
    def may_hang(self) -> bool:
        """Whether `read` can outlast its timeout, as a call into a driver can, and needs a thread of its own."""

    def read(self, timeout_s: float) -> Reading:
        """Raises a ProbeError, and nothing else, where the way is closed."""


class HostProbe(Protocol):
    def read(self) -> Host: ...


class Launch(Struct, frozen=True, kw_only=True):
    """All that an engine needs to run one attempt. The environment may hold secrets. Its `folder` is made where it is
    not there, in one that is. A `task` is at that `place`, in words for people. An `engine` that places work itself is
    given `terms`; the local one has none."""

    job_id: int
    attempt: int
    command: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    stdin: str | None = None
    folder: str | None = None
    task: Task | None = None
    place: str = ""
    engine: str = ""
    terms: ClusterTerms | None = None

    @property
    def key(self) -> str:
        return f"{self.job_id}.{self.attempt}"

    def __repr__(self) -> str:
        return f"Launch({self.key})"


class Prepared(Struct, frozen=True, kw_only=True):
    """Ready to begin; nothing of the program has run yet. `pid` is the keeper's, who will be its parent; 0 where that
    is on some other machine."""

    job_id: int
    attempt: int
    pid: int
    log: str


class Ended(Struct, frozen=True, kw_only=True):
    """An attempt that is over, and what became of the program; `pid` is the one it had and
    `at` the time of its end, where they are known; `shortage` where it ran out of memory. What it was seen to use is
    told where only the engine could see it."""

    job_id: int
    attempt: int
    outcome: Outcome
    pid: int | None = None
    at: float | None = None
    shortage: Shortage | None = None
    usage: Usage | None = None


class SiteStatus(Struct, frozen=True, kw_only=True):
    """An attempt as an engine that places work itself has it: it waits there for that `reason`, or runs at a `place`
    since `at`."""

    job_id: int
    attempt: int
    site_id: str
    reason: str = ""
    place: str | None = None
    at: float | None = None


class Engine(Protocol):
    """Runs attempts that outlive whoever started them.

    It runs them at once, on what was claimed for them here; or it places them itself, on the terms it is given, and
    tells by `site_changes` where they are.

    `prepare` makes everything ready; `start_prepared` starts all prepared attempts, under a keeper that outlives the
    daemon. A daemon that dies between the two calls leaves nothing behind: the next daemon gets the outcome
    NEVER_STARTED.
    """

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """EnvironmentFault where the system will not make another process."""

    def start_prepared(self) -> None:
        """Lets run what was prepared since the last `start_prepared` or `discard_prepared`."""

    def discard_prepared(self) -> None:
        """Ends what was prepared since, without running it; nobody will hear of it from `ended`."""

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        """Watches attempts that an earlier daemon began; `ended` tells of those that are over, or will be."""

    def ended(self) -> list[Ended]:
        """Those that have ended since it was last asked, or some of them, if more are to be had at the next call; never
        blocks."""

    def signal(self, attempt: Attempt, signum: int) -> int:
        """Sends it to every process of the attempt that can be found, but its keeper: to how many. Where the processes
        are elsewhere, it has the attempt ended, and is not zero."""

    def site_changes(self) -> list[SiteStatus]:
        """What has changed since it was last asked of those that it places itself; never blocks. Of one that has ended
        it was told where it ran before `ended` tells of its end."""

    def offer(self) -> Offer:
        """What it will take now; never blocks."""

    def close(self) -> None:
        """What was prepared is forgotten, what was begun goes on."""


class PlacesNothing:
    """For engines that run attempts at once, on what was claimed for them: they place nothing."""

    def site_changes(self) -> list[SiteStatus]:
        return []

    def offer(self) -> Offer:
        return Offer()

    def close(self) -> None: ...


class HeldClaim(Protocol):
    """A lease in this process's hands, until an attempt has inherited it."""

    @property
    def lease(self) -> Lease: ...

    @property
    def descriptor(self) -> int: ...

    def leave(self) -> None:
        """Closes this process's hold; whoever inherited it keeps the lease."""

    def release(self) -> None:
        """Ends the lease for all."""


class WantedClaim(Struct, frozen=True, kw_only=True):
    """A new lease; or, where it `amends` one of ours, what that one is for from now on: without shares, nothing."""

    claim: Claim
    label: str = ""
    amends: str | None = None


class LeaseLedger(Protocol):
    """The ledger as the queue uses it."""

    def grant(
        self, decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[WantedClaim]]
    ) -> Sequence[HeldClaim]:
        """Leases for all that `decide` wants of what is live, before anybody else can ask; those that it amends, which
        may have ended by now, are not among them."""

    def measure(self, snapshot: Snapshot, leases: tuple[Lease, ...]) -> dict[tuple[str, str], float | None]:
        """Memory that each lease's processes hold on each device."""

    def foreign_loads(
        self, snapshot: Snapshot, leases: tuple[Lease, ...], now: float, bound: float | None
    ) -> Mapping[str, ForeignLoad]:
        """How busy processes without a lease keep each device. Over `bound` percent counts as too busy."""

    def enter_line(self, need: Need, priority: int, label: str) -> None:
        """Lets others know what we wait for; in place of what we waited for before."""

    def leave_line(self) -> None: ...

    def my_ticket(self) -> str | None: ...


class SuspendResult(Struct, frozen=True, kw_only=True):
    """How a suspension or a resumption came out. Where it could not be, the attempt is as it was before, unless it
    `is_ruined`: then it can never go on, and has to be ended. `held_mb` is what it held on each device when it was
    suspended, as far as anybody can tell."""

    job_id: int
    attempt: int
    is_resumed: bool
    is_done: bool
    is_ruined: bool = False
    text: str = ""
    seconds: float | None = None
    held_mb: dict[str, float] = {}


class Suspender(Protocol):
    """Moves a running attempt's device memory to host RAM, and back."""

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        """Why this attempt cannot be suspended here; `None` where nothing speaks against it."""

    def suspend(self, attempt: Attempt) -> None:
        """Begins. To ask again for what is under way or done is harmless."""

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        """Begins. So much has to be free on each device at the last moment; the ledger holds it already."""

    def moved(self) -> list[SuspendResult]:
        """Those that came out since it was last asked; never blocks."""
