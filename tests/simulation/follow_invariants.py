"""Invariants of programs that a keeper starts by itself: checked by the world's log and the simulated ledger.

- A program that runs has a lease that reserves what its job declares, on the devices that it uses, for itself alone.
- Each attempt begins once.
- After an order (a pause, a drain, a stopped tag) was answered, no job begins that it concerns, unless the keeper had
  taken it before.
- A keeper takes no job while a request is carried out.
- It takes none after a complete step that could have known why not: a job of a higher priority waits for such
  a place, a limit is reached, a device has failed, or foreign processes hold its memory.
- What has begun is recorded with the step that reads the keeper's report.
"""

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct

from gpuyard.core.job.job import Growth, Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import FixedMemory, Need, WholeDevice
from gpuyard.core.scheduling.world import SchedulingLimits
from gpuyard.core.snapshot import Snapshot
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from tests.simulation.behaviors import MEMORY_MB
from tests.simulation.programs import Program
from tests.simulation.world import FOREIGN_PID, World

_NEARLY_EMPTY_MB = max(1024.0, 0.05 * MEMORY_MB)


class KnownStep(Struct, frozen=True):
    """What the last complete step with a fresh sample knew, and the length of the world's log at its end."""

    place: int = 0
    seen: Snapshot | None = None
    limits: SchedulingLimits | None = None
    waiting: Sequence[Job] = ()


class FollowWatch:
    def __init__(self, world: World, database: Database) -> None:
        self.has_failed_step = False
        self.followed = 0
        self._world = world
        self._database = database
        self._known = KnownStep()
        self._place = 0  # in the world's log
        self._begun: set[tuple[int, int]] = set()
        self._changes = 0  # requests that are carried out
        self._asked: dict[str, int] = {}
        self._stopped: dict[str, int] = {}
        self._taken: dict[tuple[int, int], int] = {}
        self._running: dict[tuple[int, int], bool] = {}  # whether it takes a place of those without devices
        self._needs: dict[tuple[int, int], Need] = {}

    def note_step(self, seen: Snapshot, limits: SchedulingLimits, before: Collection[Job]) -> None:
        """Note a complete step with a fresh sample; `before` are the jobs that were ready when it began."""
        self.check()  # what has begun since the step before was taken by what that one knew
        store = JobStore(self._database)
        states = store.states_of([job.id for job in before])
        waiting = [job for job in before if states.get(job.id) is JobState.QUEUED]
        self._known = KnownStep(len(self._world.log), seen, limits, waiting)

    def is_unrecorded(self, program: Program) -> bool:
        """Return whether a program may run and not be recorded: its daemon lives, and did not learn of it in a step
        that could record it."""
        if program.after is None or program.keeper is None or not program.keeper.has_daemon:
            return False
        return not program.is_told or self.has_failed_step

    def allow_all(self) -> None:
        """Forget all orders: nothing is stopped any more."""
        for order in [*self._asked, *self._stopped]:
            self._world.record("allowed", order)

    def check(self) -> None:
        store = JobStore(self._database)
        log, place = self._world.log, self._place
        self._place = len(log)
        for number in range(place, len(log)):
            _, kind, what = log[number]
            if kind == "taken":
                assert not self._changes, f"the keeper takes {what} while a request is carried out"
                self._taken[what] = number
            elif kind == "begins":
                self._check_start(store, self._world.begun[len(self._begun)], number)
            else:
                self._note(number, kind, what)
        self._check_leases()

    def _note(self, number: int, kind: str, what: Any) -> None:
        """Note an entry of the log that is neither the start of a program nor before one."""
        if kind in ("change begins", "change ends"):
            self._changes += 1 if kind == "change begins" else -1
        elif kind == "dies":
            self._changes = 0
        elif kind == "asked":
            self._asked[what] = number
        elif kind == "stopped":
            self._stopped[what] = self._asked[what]
        elif kind == "allowed":
            self._stopped.pop(what, None)
        elif kind == "reboot":
            self._running.clear()
        elif kind == "over":
            self._running.pop(what[0], None)

    # Starts

    def _check_start(self, store: JobStore, program: Program, number: int) -> None:
        name, job = program.name, store.job(program.job_id)
        assert name not in self._begun, f"attempt {name} begins twice"
        assert job is not None
        self._begun.add(name)
        self._needs[name] = job.spec.need
        decided_at = number if program.after is None else self._taken[name]
        for order, asked_at in self._stopped.items():
            concerns = _concerns(order, job, program)
            assert not concerns or decided_at < asked_at, f"{name} begins after it was answered: {order}"
        if program.after is not None:
            self.followed += 1
            if decided_at >= self._known.place:
                self._check_successor(program, job)
        self._running[name] = not job.spec.need.devices and job.spec.pace is None

    def _check_successor(self, program: Program, job: Job) -> None:
        """Check against what a complete step knew before the keeper took the program."""
        known, name = self._known, program.name
        others = sum(self._running.values())
        is_counted = not job.spec.need.devices and known.limits is not None
        assert not is_counted or known.limits is None or others < known.limits.cpu_jobs, (
            f"{name} follows, and {others} jobs without devices run already"
        )
        for other in known.waiting:
            assert other.priority <= job.priority or other.id in self._taken_jobs() or not _would_fit(other, job), (
                f"job {other.id} of a higher priority waits, and {name} follows"
            )
        for device_id in program.devices:
            self._check_device(program, device_id)

    def _taken_jobs(self) -> set[int]:
        return {job_id for job_id, _ in self._taken}

    def _check_device(self, program: Program, device_id: str) -> None:
        device = None if self._known.seen is None else self._known.seen.device(device_id)
        granted = self._world.granted.get(program.lease_id or "")
        share = None if granted is None else granted.lease.on(device_id)
        if device is None or share is None:
            return
        assert device.fault is None, f"{program.name} follows on {device_id}, which has failed"
        foreign = sum(each.memory_mb or 0.0 for each in device.processes or () if each.pid == FOREIGN_PID)
        free_mb = MEMORY_MB - foreign
        if share.memory_mb is None:
            is_free = foreign <= _NEARLY_EMPTY_MB
        else:
            is_free = bool(share.spread_mb) or share.memory_mb <= free_mb + 1e-6
        assert is_free, f"{program.name} follows on {device_id}, where foreign processes hold {foreign} MB"

    # Leases

    def _check_leases(self) -> None:
        by_lease: dict[str, Program] = {}
        for program in self._world.programs:
            if not program.is_running or program.lease_id is None:
                continue
            granted = self._world.granted.get(program.lease_id)
            assert granted is not None, f"{program.name} runs, and its lease has ended"
            other = by_lease.setdefault(program.lease_id, program)
            assert other is program, f"{other.name} and {program.name} have one lease"
            if program.is_frozen or program.stash_mb is not None or program.name not in self._needs:
                continue
            need, shares = self._needs[program.name], granted.lease.shares
            assert len(shares) >= need.devices, f"{program.name} runs with {len(shares)} of {need.devices} devices"
            on = {share.device_id for share in shares}
            assert set(program.devices) <= on, f"{program.name} uses {program.devices}, and has a lease on {on}"
            for share in shares:
                is_all = share.is_exclusive
                least = need.memory.required_mb if isinstance(need.memory, FixedMemory) else 0.0
                assert is_all or not isinstance(need.memory, WholeDevice), f"{program.name} has no device for itself"
                assert is_all or (share.memory_mb or 0.0) >= least - 1e-6, (
                    f"{program.name} needs {least} MB, and its lease has {share.memory_mb}"
                )
        self._check_exclusive(by_lease)

    def _check_exclusive(self, by_lease: dict[str, Program]) -> None:
        for device_id in self._world.device_ids:
            shares = [granted.lease.on(device_id) for granted in self._world.granted.values()]
            here = [share for share in shares if share is not None]
            has_one = len(here) <= 1 or not any(share.is_exclusive for share in here)
            assert has_one, f"{device_id} is exclusive, and leased to {len(here)}"


def _concerns(order: str, job: Job, program: Program) -> bool:
    kind, _, target = order.partition(" ")
    if kind == "pause":
        return True
    return job.spec.tag == target if kind == "stop_tag" else target in program.devices


def _would_fit(other: Job, job: Job) -> bool:
    """Return whether the other job could have had the place of this one, whatever is learned about either."""
    mine, its = job.spec, other.spec
    is_known = not its.need.devices or isinstance(its.need.memory, FixedMemory | WholeDevice)
    is_free = other.group_limit is None and its.pace is None and not its.engine and other.growth == Growth()
    return is_known and is_free and (its.need, its.tag, other.user) == (mine.need, mine.tag, job.user)
