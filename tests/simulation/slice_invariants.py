"""Invariants of programs that run in slices: checked by the world's log and the simulated ledger.

- A program that runs has a lease that reserves what its job declares, on the devices that it uses, for itself alone.
- Each attempt begins once.
- After an order (a pause, a drain, a stopped tag) was answered, no job begins that it concerns.
- No job takes its turn while a request is carried out.
- No job takes its turn a second after the first job of its slice began, so that others wait no longer.
"""

from typing import Any

from gpuyard.model.job import Job
from gpuyard.model.lease import FixedMemory, Need, WholeDevice
from gpuyard.policy.plan import LONGEST_S
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from tests.simulation.programs import Program
from tests.simulation.world import World


class SliceWatch:
    def __init__(self, world: World, database: Database) -> None:
        self.has_failed_step = False  # the disk was full: what that step had to take back goes on
        self.turns = 0  # programs that a keeper started in slices, after the first
        self._world = world
        self._database = database
        self._place = 0  # in the world's log
        self._begun: set[tuple[int, int]] = set()
        self._changes = 0  # requests that are carried out
        self._asked: dict[str, int] = {}
        self._stopped: dict[str, int] = {}
        self._needs: dict[tuple[int, int], Need] = {}

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
            if kind == "begins":
                self._check_start(store, self._world.begun[len(self._begun)])
            else:
                self._note(number, kind, what)
        self._check_leases()

    def _note(self, number: int, kind: str, what: Any) -> None:
        """Note an entry of the log that is not the start of a program."""
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

    # Starts

    def _check_start(self, store: JobStore, program: Program) -> None:
        name, job = program.name, store.job(program.job_id)
        assert name not in self._begun, f"attempt {name} begins twice"
        assert job is not None
        self._begun.add(name)
        self._needs[name] = job.spec.need
        for order in self._stopped:
            assert not _concerns(order, job, program), f"{name} begins after it was answered: {order}"
        if program.after is not None:
            self.turns += 1
            assert not self._changes, f"{name} takes its turn while a request is carried out"
            first = program
            while first.after is not None:
                first = first.after
            waited_s = (program.began_at or 0.0) - (first.began_at or 0.0)
            is_over = waited_s > LONGEST_S + 1e-6 and not self.has_failed_step
            assert not is_over, f"{name} takes its turn {waited_s:.3f} s after its slice began"

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
