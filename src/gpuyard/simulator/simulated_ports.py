"""The controller's ports over a simulated machine: a ledger, an engine and a suspender, all in memory."""

import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpuyard.model.job import Attempt, Outcome, OutcomeKind
from gpuyard.model.lease import Holder, Lease, Need, Ticket, amended
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared, SuspendResult, WantedClaim
from gpuyard.simulator.schedule_metrics import SimulatedRun
from gpuyard.simulator.traces import TraceJob
from gpuyard.simulator.virtual_machine import MemoryLocation, SimulatedProgram, VirtualMachine

ME = Holder(uid=0, user="sim", pid=1, boot_id="sim")


class SimulatedLease:
    """Implements `ports.HeldClaim`. The lease lasts until its program ends."""

    def __init__(self, ledger: "SimulatedLedger", lease: Lease, descriptor: int) -> None:
        self.lease, self.descriptor = lease, descriptor
        self.release = partial(ledger.end, descriptor)

    def leave(self) -> None: ...


class SimulatedLedger:
    """Implements `ports.LeaseLedger`. No other process leases devices, so tickets have no effect: `my_ticket` returns a
    constant, or a step would follow each wait. `granted` are leases as they were first granted, by descriptor."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.granted: dict[int, Lease] = {}
        self._machine = machine
        self._leases: dict[str, Lease] = {}
        self._measured: dict[tuple[str, str], float | None] = {}
        self._last_descriptor = 0

    def grant(
        self, decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[WantedClaim]]
    ) -> list[SimulatedLease]:
        granted = []
        for wanted in decide(*self.read()):
            if wanted.amends is None:
                self._last_descriptor += 1
                lease = Lease(
                    id=wanted.remakes or f"L{self._last_descriptor}",
                    holder=replace(ME, label=wanted.label),  # without a label, each step would amend each lease
                    shares=wanted.claim.shares,
                    since=self._machine.now,
                    host=wanted.claim.host,
                )
                self.granted[self._last_descriptor] = self._leases[lease.id] = lease
                self.set_measured(self._last_descriptor, 0.0)
                granted.append(SimulatedLease(self, lease, self._last_descriptor))
            elif wanted.amends in self._leases:
                self._leases[wanted.amends] = amended(self._leases[wanted.amends], wanted.claim)
        return granted

    def read(self) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
        return tuple(self._leases.values()), ()

    def end(self, descriptor: int) -> None:
        lease = self.granted.pop(descriptor)
        del self._leases[lease.id]
        for share in lease.shares:
            del self._measured[lease.id, share.device_id]

    def set_measured(self, descriptor: int, held_mb: float) -> None:
        """Record the memory that the program of a lease holds on each of its devices."""
        lease = self.granted[descriptor]
        for share in lease.shares:
            self._measured[lease.id, share.device_id] = held_mb

    def measure(self, *_: object) -> dict[tuple[str, str], float | None]:
        return self._measured

    def _measure_nothing(self, *_: object, **__: object) -> dict[Any, Any]:
        """Foreign processes of a trace take memory, but their load is not tracked."""
        return {}

    measure_loads = measure_host = measure_holders = foreign_loads = _measure_nothing

    def drains(self) -> tuple[()]:
        return ()

    health_marks = drains

    def take_ticket(self, need: Need, priority: int, label: str) -> None: ...

    def return_ticket(self) -> None: ...

    def my_ticket(self) -> str | None:
        return "ours"


class SimulatedEngine(PlacesNothing):
    """Implements `ports.Engine`. `jobs`: trace jobs with their positions, by job id; `over`: runs that ended."""

    def __init__(self, machine: VirtualMachine, ledger: SimulatedLedger) -> None:
        self.jobs: dict[int, tuple[int, TraceJob]] = {}
        self.programs: dict[tuple[int, int], SimulatedProgram] = {}
        self.over: list[SimulatedRun] = []
        self._machine, self._ledger = machine, ledger
        self._descriptors: dict[SimulatedProgram, int] = {}
        self._prepared: list[tuple[Launch, SimulatedProgram]] = []
        self._ended: list[Ended] = []

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        assert lease_descriptor is not None
        number, job = self.jobs[launch.job_id]
        shares = self._ledger.granted[lease_descriptor].shares
        program = self._machine.make(job, number, tuple([self._machine.positions[share.device_id] for share in shares]))
        self._descriptors[program] = lease_descriptor
        self._prepared.append((launch, program))
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, keeper_pid=program.pid, log="")

    def start_prepared(self) -> None:
        for launch, program in self._prepared:
            name = (launch.job_id, launch.attempt)
            self.programs[name] = program
            program.on_end = partial(self._record_end, name)
            self._machine.start(program)
        self._prepared.clear()

    def _record_end(self, name: tuple[int, int], program: SimulatedProgram, outcome: Outcome) -> None:
        self._ledger.end(self._descriptors.pop(program))
        del self.programs[name]
        now, (job_id, attempt), shortage = self._machine.now, name, program.shortage
        self._ended.append(
            Ended(job_id=job_id, attempt=attempt, outcome=outcome, pid=program.pid, at=now, shortage=shortage)
        )
        kind = outcome.kind if shortage is None else OutcomeKind.OUT_OF_MEMORY
        self.over.append(
            SimulatedRun(
                job=program.number, started_s=program.started_at, ended_s=now, devices=program.devices, outcome=kind,
                peak_mb=program.peak_mb, done_s=program.progress_s, paused_s=program.paused_s,
                suspensions=program.suspensions,
            )
        )  # fmt: skip

    def discard_prepared(self) -> None:
        for _, program in self._prepared:
            del self._descriptors[program]
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        """Do nothing: no attempt outlives a simulation."""

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:  # noqa: ARG002 - programs leave no processes
        ended, self._ended = self._ended, []
        return ended

    def signal(self, attempt: Attempt, signum: int) -> int:
        program = self.programs.get((attempt.job_id, attempt.number))
        if program is None:
            return 0
        if signum in (signal.SIGTERM, signal.SIGKILL):
            self._machine.kill(program, Outcome(kind=attempt.stopping or OutcomeKind.FAILED, status=128 + signum))
        return 1

    def update_measurements(self) -> None:
        """Record in the ledger the memory of the programs whose memory has changed."""
        for program in self._machine.changed:
            if (descriptor := self._descriptors.get(program)) is not None:
                self._ledger.set_measured(descriptor, program.held_mb)
        self._machine.changed.clear()

    def devices_of(self, job_ids: Collection[int]) -> Iterator[int]:
        for (job_id, _), program in self.programs.items() if job_ids else ():
            if job_id in job_ids:
                yield from program.devices


class SimulatedSuspender:
    """Implements `ports.Suspender`."""

    def __init__(self, machine: VirtualMachine, engine: SimulatedEngine) -> None:
        self._machine, self._engine = machine, engine
        self._moved: list[SuspendResult] = []

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        program = self._program(attempt)
        available_mb = snapshot.host.memory_available_mb or 0.0
        if program is not None and program.held_mb * len(program.devices) > available_mb:
            return "too little RAM is free for its memory"
        return None

    def can_park(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return False

    def suspend(self, attempt: Attempt) -> None:
        program = self._program(attempt)
        if program is not None and program.where is MemoryLocation.ON:
            started = self._machine.now
            program.on_moved = lambda _: self._report(attempt, is_resumed=False, seconds=self._machine.now - started)
            self._machine.suspend(program)

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:  # noqa: ARG002
        program = self._program(attempt)
        if program is None or program.where is not MemoryLocation.AWAY:
            return
        started = self._machine.now
        program.on_moved = lambda _: self._report(attempt, is_resumed=True, seconds=self._machine.now - started)
        if not self._machine.resume(program):
            self._report(attempt, is_resumed=True, error="too little device memory is free")

    def moved(self) -> list[SuspendResult]:
        moved, self._moved = self._moved, []
        return moved

    def _program(self, attempt: Attempt) -> SimulatedProgram | None:
        return self._engine.programs.get((attempt.job_id, attempt.number))

    def _report(self, attempt: Attempt, *, is_resumed: bool, seconds: float | None = None, error: str = "") -> None:
        self._moved.append(
            SuspendResult(
                job_id=attempt.job_id, attempt=attempt.number, is_resumed=is_resumed, is_done=not error, text=error,
                seconds=seconds,
            )
        )  # fmt: skip
