"""Interfaces between the code that decides and the code that touches the system, as Protocols."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from msgspec import Struct

from gpuyard.model.cluster_terms import ClusterTerms, Offer
from gpuyard.model.container import Container
from gpuyard.model.job import Attempt, Outcome, OutcomeKind, SiteRequest, Usage
from gpuyard.model.job_spec import DEFAULT_LOG_CAP_MB, CodeSnapshot, Task
from gpuyard.model.lease import Claim, Drain, Lease, Need, Ticket
from gpuyard.model.machine_snapshot import Device, HealthMark, Snapshot
from gpuyard.model.out_of_memory import Shortage
from gpuyard.model.shell_environment import ShellSettings
from gpuyard.policy.disk_and_system_limits import DiskFigure, ResourceLimit
from gpuyard.policy.foreign_load import ForeignLoad
from gpuyard.policy.host_room import HostUse


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch. In a queue: queue time, which never jumps (model/queue_time.py)."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back, for measuring durations. Does not count the time suspended."""

    def asleep(self) -> float:
        """Seconds for which the machine has been suspended since it booted, plus a constant."""

    def to_wall(self, at: float) -> float:
        """Return the wall time of a time of `now`, for people."""

    def from_wall(self, at: float) -> float:
        """Return the time of `now` at a wall time, such as one that another program reports."""

    def sleep(self, seconds: float) -> None: ...


class Launch(Struct, frozen=True, kw_only=True):
    """Everything an engine needs to run one attempt. The environment may hold secrets, so `repr` hides it."""

    job_id: int
    attempt: int
    command: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    stdin: str | None = None
    folder: str | None = None  # the engine creates it if it is missing (its parent must exist)
    task: Task | None = None
    retried: str = ""  # which attempt of how many this is of a `task`, and why; empty for the first
    place: str = ""  # where a workspace `task` runs, as its session name shows it
    engine: str = ""
    terms: ClusterTerms | None = None  # set only for an `engine` that places work itself
    log_cap_mb: float = DEFAULT_LOG_CAP_MB
    output: str | None = None  # file for standard output, None for a log of the engine
    error: str | None = None  # file for standard error, None for that of standard output
    split_stderr: bool = False  # standard error gets a log of its own
    timestamps: bool = False  # each line of output begins with the time
    container: Container | None = None
    devices: tuple[Device, ...] = ()  # what a `container` is given
    shell: ShellSettings | None = None
    cpus: tuple[int, ...] = ()  # the CPUs that it may run on; empty: any
    ram_limit_mb: float | None = None  # it is ended if it takes more RAM
    snapshot: CodeSnapshot | None = None  # of its code, where it runs; its results are brought back at its end
    rest: "tuple[Launch, ...]" = ()  # launches that run after it, one after the other, on its lease: a slice

    @property
    def key(self) -> str:
        return f"{self.job_id}.{self.attempt}"

    @property
    def log_cap(self) -> int:
        """The cap of its log in bytes."""
        return int(self.log_cap_mb * 1048576)

    def __repr__(self) -> str:
        return f"Launch({self.key})"


class Prepared(Struct, frozen=True, kw_only=True):
    """An attempt that is ready to start; its program has not run yet."""

    job_id: int
    attempt: int
    keeper_pid: int = 0  # the keeper, which will be the parent process; 0 if the attempt will run on another machine
    log: str
    error_log: str | None = None
    rest: "tuple[Prepared, ...]" = ()  # of the slice: as many as the engine takes


class Ended(Struct, frozen=True, kw_only=True):
    """The end of an attempt."""

    job_id: int
    attempt: int
    outcome: Outcome
    pid: int | None = None  # the program's, if known
    at: float | None = None  # the wall time of its end, if known
    shortage: Shortage | None = None  # set if it ran out of memory
    device_fault: str | None = None  # what its log says about a fault of its GPU
    limit: ResourceLimit | None = None  # set if it never started because of a limit that passes
    usage: Usage | None = None  # set by engines whose programs cannot be measured from this machine
    warned_at: float | None = None  # the wall time of the signal before its stop, if the engine sent it itself
    unbrought: str | None = None  # why its results could not be brought back from its snapshot
    node: str | None = None  # the node of a cluster that could not start it, which its engine leaves out for a while


class SiteStatus(Struct, frozen=True, kw_only=True):
    """Where an engine that places work itself has an attempt: it waits there for `reason`, or runs at `place` since the
    wall time `at`, and may be suspended there; None: unknown."""

    job_id: int
    attempt: int
    site_id: str
    reason: str = ""
    place: str | None = None
    at: float | None = None
    is_suspended: bool | None = None
    request: SiteRequest | None = None  # what the engine was sent
    keeper_pid: int = 0  # set for an attempt of a slice that has begun on this machine


class AnyEngine(Protocol):
    """Runs attempts that outlive the daemon that started them: at once, on the devices claimed for them here, or it
    places them itself by their terms and reports in `site_changes` where they are.

    `prepare` makes everything ready; `start_prepared` starts all prepared attempts, under a keeper that outlives the
    daemon. If a daemon dies between the two calls, the next one gets the outcome NEVER_STARTED."""

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """Raise EnvironmentFault if the system cannot create another process."""

    def start_prepared(self) -> None:
        """Start what was prepared since the last `start_prepared` or `discard_prepared`."""

    def discard_prepared(self) -> None:
        """Drop what was prepared since then without running it; `ended` never reports it."""

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        """Watch attempts that an earlier daemon started; `ended` reports each of them when it is over."""

    def withdraw(self, attempt: Attempt) -> None:
        """Let an attempt that waits at its site, or for its turn in a slice, not start: `ended` reports it as
        NEVER_STARTED, when it is certain. One that has begun goes on. Never blocks."""

    def site_changes(self) -> list[SiteStatus]:
        """Return what changed since the last call for attempts that this engine places itself, or that have begun in a
        slice. Never blocks. Where an attempt ran is reported before `ended` reports its end."""


class Engine(AnyEngine, Protocol):
    """An engine that a plugin may be, too."""

    def ended(self) -> list[Ended]:
        """Return attempts that have ended since the last call. Never blocks; may leave some for the next call."""

    def signal(self, attempt: Attempt, signum: int) -> int:
        """Send a signal to every process of the attempt except its keeper, and return to how many. For an attempt on
        another machine, ask the site to end it and return a number above zero."""

    def offer(self) -> Offer:
        """Return what the engine accepts now. Never blocks."""

    def close(self) -> None:
        """Forget what was prepared; started attempts keep running."""


# Whether an attempt that has ended in this way was asked to stop, or lost its keeper: by job and number.
IsCutOff: TypeAlias = Callable[[int, int, OutcomeKind], bool]


class Signalling(Enum):
    """Which processes of an attempt get a signal, and what is returned."""

    ALL = "all"  # how many got it; None while it is under way: no second one is sent meanwhile
    HANDLERS = "handlers"  # the same, for the processes that handle the signal only
    SOON = "soon"  # nothing: it is sent soon, whether or not one is under way


class HostEngine(AnyEngine, Protocol):
    """The engine of this machine. It runs attempts at once, may take fewer of the rest of a slice, and can signal many
    at one reading of the process table."""

    def is_ready(self) -> bool:
        """Return whether `start_prepared` would not wait. If not, get ready. Never blocks."""

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        """Return what `Engine.ended` does. Processes that attempts left are killed before, if `is_cut_off`.
        `has_unrecorded`: the caller still needs ends that were returned, after a crash too."""

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> Sequence[int | None]:
        """Send a signal to the processes of each attempt but its keeper. Never blocks."""


class HeldClaim(Protocol):
    """A lease that this process holds until an attempt has inherited it."""

    @property
    def lease(self) -> Lease: ...

    @property
    def descriptor(self) -> int: ...

    def leave(self) -> None:
        """Close this process's descriptor; a process that inherited it keeps the lease."""

    def release(self) -> None:
        """End the lease for all processes."""


class WantedClaim(Struct, frozen=True, kw_only=True):
    """A claim for a new lease, or new shares for our own lease `amends` (no shares: the lease reserves nothing), or a
    lease to be made again under its old id `remakes`, because its file was removed."""

    claim: Claim
    label: str = ""
    amends: str | None = None
    remakes: str | None = None


class LeaseLedger(Protocol):
    """The ledger as the queue uses it."""

    def grant(
        self, decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[WantedClaim]]
    ) -> Sequence[HeldClaim]:
        """Call `decide` with all live leases and tickets while the ledger is locked; return a lease for each claim
        that it wants, those that are made again first, or for the first ones if this process may not open more files.
        Amended leases, which may have ended by then, are not returned. Raises LedgerBusy if another process has it
        locked: the queue makes another step as soon as it can be locked."""

    def read(self) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
        """Return all live leases and tickets, without waiting for processes that change the ledger."""

    def drains(self) -> Sequence[Drain]:
        """Return the drains as of the last `grant` or `read`; within `decide`, as of this grant."""

    def health_marks(self) -> Sequence[HealthMark]:
        """Return the health marks as of the last `grant` or `read`."""

    def measure(self, snapshot: Snapshot, leases: tuple[Lease, ...]) -> dict[tuple[str, str], float | None]:
        """Return the memory that the processes of each lease hold, by (lease id, device id)."""

    def measure_loads(self, snapshot: Snapshot, leases: tuple[Lease, ...]) -> dict[tuple[str, str], float | None]:
        """Return by lease and device how busy its processes keep the device; empty where the driver does not say."""

    def measure_host(self, leases: Sequence[Lease], *, again: bool) -> Mapping[str, HostUse]:
        """Return the RAM that the processes of leases use, by lease id; not of leases that say so themselves. Without
        `again`, processes that started since the last reading may be missing."""

    def measure_holders(self, leases: Sequence[Lease]) -> Mapping[str, float]:
        """Return the RAM in MB that the processes of leases hold, by lease id, whether they reserve any or not; not of
        leases whose processes cannot be measured."""

    def foreign_loads(
        self, snapshot: Snapshot, leases: tuple[Lease, ...], now: float, bound: float | None
    ) -> Mapping[str, ForeignLoad]:
        """Return how busy foreign processes keep each device. Above `bound` percent counts as too busy."""

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        """Put up a ticket that shows others what we wait for, in place of our previous ticket."""

    def return_ticket(self) -> None: ...

    def my_ticket(self) -> str | None: ...


class SuspendResult(Struct, frozen=True, kw_only=True):
    """The result of a suspend or resume."""

    job_id: int
    attempt: int
    is_resumed: bool
    is_done: bool  # if not, the attempt is as it was before, unless it `is_ruined`
    is_ruined: bool = False  # it can never continue and has to be ended
    may_pass: bool = False  # a limit of the system prevented it: another try may succeed
    text: str = ""  # why it is not done; of a suspension that is done, why a registered program has not parked
    seconds: float | None = None
    held_mb: dict[str, float] = {}  # memory it held on each device when it was suspended, as far as it was measured
    parked_mb: float | None = None  # how much of it the program has moved itself; None: nothing, the driver did


class Suspender(Protocol):
    """Moves the device memory of a running attempt to host RAM and back."""

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        """Return why this attempt cannot be suspended here, or None."""

    def can_park(self, attempt: Attempt) -> bool:
        """Return whether its program has registered to move its device memory itself, which is faster and needs no
        RAM: it has that already."""

    def suspend(self, attempt: Attempt) -> None:
        """Start to suspend. Repeating the request while it is in progress or done is harmless."""

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        """Start to resume. `needs_mb` must be free on each device at that moment; the ledger has reserved it."""

    def moved(self) -> list[SuspendResult]:
        """Return the results since the last call. Never blocks."""


class DiskSpace(Protocol):
    """The free space of disks, read in the background."""

    def figure(self, folder: str, least_mb: float) -> DiskFigure | None:
        """Return the figure of the folder's disk, to compare with `least_mb`; None while it is read. Never waits."""

    def known(self) -> dict[str, DiskFigure]:
        """Return the last figure of each folder that was asked for."""


class PlacesNothing:
    """Base for these engines: they place nothing themselves. By default no program handles warnings."""

    def signal(self, attempt: Attempt, signum: int) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        return True

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> Sequence[int | None]:
        return [0 if how is Signalling.HANDLERS else self.signal(attempt, signum) for attempt in attempts]

    def withdraw(self, attempt: Attempt) -> None: ...

    def site_changes(self) -> list[SiteStatus]:
        return []

    def offer(self) -> Offer:
        return Offer()

    def close(self) -> None: ...
