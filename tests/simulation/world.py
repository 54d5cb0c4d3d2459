"""The simulated machine of the crash tests: clock, devices, supervised programs, foreign memory, leases and a journal.

It survives the daemon: programs, leases and the journal stay when a daemon dies. It does not know the controller.
What a program does is its behavior (behaviors.py); here programs share devices, and run out of memory if a device is
full.
Clock, events, devices, their readings and shortages are those of `gpuyard simulate`.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from gpuyard.engines.common.spawn_program import BEGAN
from gpuyard.model.lease import Claim, Drain, Holder, Lease, Ticket, amended
from gpuyard.model.machine_snapshot import Device, Host, Snapshot
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.virtual_machine import (
    EPOCH,
    EventQueue,
    ScheduledEvent,
    VirtualClock,
    find_shortage,
    read_device,
)
from tests.simulation.behaviors import EVERYTHING, MEMORY_MB, BehaviorOf
from tests.simulation.programs import Program

if TYPE_CHECKING:
    from tests.simulation.keeper import SimulatedKeeper

RAM_MB = 64_000.0
FOREIGN_PID = 1
Action = Callable[[], None]
LogEntry = tuple[float, str, Any]
Granting = Callable[[Lease, Snapshot], None]


@dataclass(frozen=True, kw_only=True)
class LoadSpike:
    """Foreign load on the host and on every device, for a while."""

    at: float
    lasts_s: float
    cpu_percent: float = 0.0
    gpu_percent: float = 0.0
    ram_mb: float = 0.0


class JournalEntry(NamedTuple):
    """`word` is a word or an exit status. `at` is when a program of a slice began."""

    job_id: int
    attempt: int
    pid: int
    word: str
    at: float | None = None


@dataclass(kw_only=True)
class Granted:
    """A lease, which lasts while any process keeps it."""

    lease: Lease
    keepers: set[str] = field(default_factory=set)


class World:
    def __init__(self, seed: int, behavior_of: BehaviorOf, devices: int = 2) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.boot = 1
        self.devices = parse_devices(f"{devices}x{MEMORY_MB:g}MB") if devices else ()
        self.device_ids = tuple(device.id for device in self.devices)
        self.programs: list[Program] = []
        self.begun: list[Program] = []
        self.journal: list[JournalEntry] = []
        self.keepers: list[SimulatedKeeper] = []
        self.drains: dict[str, Drain] = {}
        self.granted: dict[str, Granted] = {}
        self.tickets: dict[str, tuple[Ticket, str]] = {}
        self.foreign_mb = dict.fromkeys(self.device_ids, 0.0)
        self.faults: dict[str, str] = {}
        self.load_spikes: list[LoadSpike] = []
        self.blind: frozenset[str] = frozenset()
        self.on_grant: list[Granting] = []
        self.log: list[LogEntry] = []
        self.ledger_woke = False
        self.had_foreign_memory = False
        self._behavior_of = behavior_of
        self._events = EventQueue(self.clock)
        self.next_event = self._events.next_time
        self.advance = self._events.advance
        self._numbers: dict[str, int] = {}

    # Time and chance

    @property
    def now(self) -> float:
        return self.clock.time

    def number(self, kind: str) -> int:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self._numbers[kind]

    def random(self, kind: str) -> Random:
        """Return a new generator each time. Those of one kind do not depend on how many of another were drawn."""
        return Random(f"{self.seed} {kind} {self.number('random ' + kind)}")

    def record(self, kind: str, what: Any) -> None:
        self.log.append((round(self.now - EPOCH, 6), kind, what))

    def after(self, seconds: float, action: Action) -> ScheduledEvent:
        return self._events.add(self.now + seconds, action)

    # Programs

    def spawn(
        self, job_id: int, attempt: int, command: tuple[str, ...], lease_id: str | None, runs_out: int = 0
    ) -> Program:
        shares = self.granted[lease_id].lease.shares if lease_id is not None else ()
        program = Program(
            job_id=job_id,
            attempt=attempt,
            pid=100 + self.number(f"pid of boot {self.boot}"),
            born_at=self.now,
            boot=self.boot,
            command=command,
            behavior=self._behavior_of(command, attempt),
            lease_id=lease_id,
            devices=tuple(share.device_id for share in shares),
            runs_out=runs_out,
        )
        self.programs.append(program)
        if lease_id is not None:
            self.granted[lease_id].keepers.add(f"pid {program.pid}")
        return program

    def write_start(self, program: Program) -> None:
        """Write the line of a program of a slice to the journal, before it begins."""
        if program.is_supervised:
            self.journal.append(JournalEntry(*program.name, program.pid, BEGAN, self.now))

    def begin(self, program: Program) -> None:
        if not program.is_supervised:
            return
        behavior = program.behavior
        program.began_at, program.is_running = self.now, True
        if program.after is None:
            self.journal.append(JournalEntry(*program.name, program.pid, BEGAN))
        self.begun.append(program)
        self.record("begins", program.name)
        self.thaw(program)
        if behavior.lost_after_s is not None:
            self.after(behavior.lost_after_s, lambda: self._lose(program))

    def thaw(self, program: Program) -> None:
        """Let the program run on from where it was frozen."""
        if not program.is_running or program.goes_since is not None:
            return
        program.goes_since = self.now
        behavior = program.behavior

        def plan(at_s: float, act: Action) -> None:
            program.events.append(self.after(max(0.0, at_s - program.ran_s), act))

        for climb in range(program.climbed, len(behavior.climbs)):
            plan(behavior.climbs[climb][0], lambda climb=climb: self._climb(program, climb))  # type: ignore[misc]
        plan(behavior.runs_s, lambda: self.exit(program, behavior.exit_status))

    def leave_unbegun(self, program: Program) -> None:
        if program.is_supervised and program.began_at is None:
            self.exit(program, "unbegun")

    def kill_supervisor(self, program: Program, fate: str) -> None:
        if program.is_supervised:
            program.fate = fate
            self._end(program)

    def signal(self, job_id: int, attempt: int, signum: int) -> int:
        """Send a signal to the programs of the attempt, not to their supervisors, and return how many it reached.

        A frozen program reacts only to SIGKILL until SIGCONT.
        """
        found = [program for program in self.programs if program.name == (job_id, attempt) and program.is_running]
        for program in found:
            self.record("signal", (program.name, int(signum)))
            if signum == signal.SIGKILL:
                self.exit(program, "137")
                continue
            program.has_sigterm = program.has_sigterm or signum == signal.SIGTERM
            reacts = signum == signal.SIGCONT or not program.is_frozen
            if program.has_sigterm and reacts and program.behavior.heeds_term:
                self.after(program.behavior.term_s, lambda program=program: self.exit(program, "143"))  # type: ignore[misc]
        return len(found)

    def exit(self, program: Program, entry: str) -> None:
        if program.began_at is not None and not program.is_running:
            return
        program.freeze(self.now)
        program.is_running = False
        program.drop_all()
        program.exited_at = self.now
        if program.is_supervised and program.keeper is not None:
            program.keeper.handle_end(program, entry)
        else:
            self.note_end(program, entry)

    def note_end(self, program: Program, entry: str) -> None:
        """Let the program's supervisor note that it has ended."""
        if program.is_supervised:
            program.journal_entry = entry
            self.journal.append(JournalEntry(*program.name, program.pid, entry))
        self._end(program)

    def kill_keeper(self, keeper: "SimulatedKeeper") -> None:
        """Kill a keeper: all its programs have lost their supervisor, and some run on."""
        keeper.die()
        for program in self.programs:
            if program.keeper is keeper:
                self._lose(program)

    def _lose(self, program: Program) -> None:
        if program.is_supervised:
            program.is_running = program.is_running and program.behavior.is_orphan
            if not program.is_running:
                program.freeze(self.now)
                program.drop_all()
            self.kill_supervisor(program, "lost")

    def _end(self, program: Program) -> None:
        if program.is_supervised:
            program.is_supervised = False
            program.ended_at = self.now
            self.record("over", (program.name, program.journal_entry or program.fate))
        if not program.is_running and program.lease_id is not None:
            keeper, lease_id = f"pid {program.pid}", program.lease_id
            lingers_s = program.behavior.lingers_s if program.began_at is not None else 0.0
            if lingers_s:
                self.after(lingers_s, lambda: self.let_go(lease_id, keeper))
            else:
                self.let_go(lease_id, keeper)

    def reboot(self) -> None:
        self.record("reboot", self.boot)
        for keeper in self.keepers:
            keeper.die()
        for program in self.programs:
            if program.is_supervised or program.is_running:
                program.freeze(self.now)
                program.drop_all()
                program.is_supervised = program.is_running = False
                program.fate, program.ended_at = "rebooted", self.now
        self.granted.clear()
        self.tickets.clear()
        self.boot += 1

    # Memory

    def free_mb(self, device_id: str) -> float:
        held = sum(program.memory_mb.get(device_id, 0.0) for program in self.programs)
        return MEMORY_MB - self.foreign_mb[device_id] - held

    def _climb(self, program: Program, climb: int) -> None:
        """Take memory on all devices of the program. If it does not fit on one, the program runs out of memory."""
        program.climbed = climb + 1
        target = program.target_mb(climb)
        more: dict[str, float] = {}
        for device_id in program.devices:
            held, free = program.memory_mb.get(device_id, 0.0), self.free_mb(device_id)
            more[device_id] = 0.9 * free if target == EVERYTHING else max(0.0, target - held)
            if more[device_id] > free:
                self._run_out(program, device_id, more[device_id])
                return
        for device_id, asked in more.items():
            program.memory_mb[device_id] = program.memory_mb.get(device_id, 0.0) + asked

    def _run_out(self, program: Program, device_id: str, asked_mb: float) -> None:
        self.record("out of memory", (program.name, device_id))
        if not program.behavior.silent:
            device, held_mb = self.devices[self.device_ids.index(device_id)], program.memory_mb.get(device_id, 0.0)
            program.shortage = find_shortage(device, MEMORY_MB - self.free_mb(device_id), held_mb, asked_mb)
        self.exit(program, "134" if program.behavior.silent else "1")

    def set_foreign_memory(self, device_id: str, memory_mb: float) -> None:
        """Set the memory of foreign processes on a device, at most what is free."""
        self.foreign_mb[device_id] = 0.0
        self.foreign_mb[device_id] = min(memory_mb, self.free_mb(device_id))
        self.had_foreign_memory = True

    # Leases

    def grant(self, holder: Holder, claim: Claim, keeper: str, remakes: str | None = None) -> Granted:
        shares, name = claim.shares, remakes or f"lease-{self.number('lease')}"
        lease = Lease(id=name, holder=holder, shares=shares, since=self.now, host=claim.host)
        self.granted[lease.id] = Granted(lease=lease, keepers={keeper})
        self.record("granted", (holder.label, tuple(share.device_id for share in shares)))
        return self.granted[lease.id]

    def check_ram(self) -> None:
        """Check that leases do not reserve RAM that has to stay free."""
        shares = [granted.lease.host for granted in self.granted.values() if granted.lease.host is not None]
        reserved = sum(share.ram_mb or 0.0 for share in shares)
        assert reserved <= 0.95 * RAM_MB + 1.0, f"{reserved} MB of RAM are reserved"

    def report_grant(self, lease: Lease, seen: Snapshot) -> None:
        """Call the listeners with the lease, and with the snapshot that led to it."""
        for listener in self.on_grant:
            listener(lease, seen)

    def amend_lease(self, lease_id: str, claim: Claim, label: str = "") -> None:
        granted = self.granted.get(lease_id)
        if granted is not None:
            granted.lease = amended(granted.lease, claim)
            if label:
                granted.lease = replace(granted.lease, holder=replace(granted.lease.holder, label=label))
            self.record("amended", (granted.lease.holder.label, tuple(share.device_id for share in claim.shares)))

    def let_go(self, lease_id: str, keeper: str) -> None:
        granted = self.granted.get(lease_id)
        if granted is not None:
            granted.keepers.discard(keeper)
            if not granted.keepers:
                self.end_lease(lease_id)

    def end_lease(self, lease_id: str) -> None:
        if self.granted.pop(lease_id, None) is not None:
            self.ledger_woke = True

    def leases(self) -> tuple[Lease, ...]:
        """Return the leases that reserve something; a suspended job's lease may reserve nothing."""
        leases = (granted.lease for granted in self.granted.values())
        return tuple(lease for lease in leases if lease.shares or lease.host is not None)

    def measure(self, snapshot: Snapshot, leases: Sequence[Lease]) -> dict[tuple[str, str], float | None]:
        """Return the memory of each lease's programs on each device in the snapshot, as far as they still run."""
        found: dict[tuple[str, str], float | None] = {
            (lease.id, share.device_id): 0.0 for lease in leases for share in lease.shares
        }
        alive = {one.pid: one.lease_id for one in self.programs if one.is_running and one.boot == self.boot}
        for device in snapshot.devices:
            for process in device.processes or ():
                key = (alive.get(process.pid) or "", device.id)
                if key in found:
                    found[key] = (found[key] or 0.0) + (process.memory_mb or 0.0)
        return found

    def check_fit(self, device_ids: Sequence[str], seen: Snapshot) -> None:
        """Assert that no device is overcommitted, by what the snapshot showed. Independent of the code under test."""
        measured = self.measure(seen, self.leases())
        for device in seen.devices:
            if device.id in device_ids:
                self._check_device(device, measured)

    def _check_device(self, device: Device, measured: dict[tuple[str, str], float | None]) -> None:
        here = [(lease, share) for lease in self.leases() if (share := lease.on(device.id)) is not None]
        used = [measured[lease.id, device.id] or 0.0 for lease, _ in here]
        foreign = (device.memory_used_mb or 0.0) - sum(used)
        if any(share.is_exclusive for _, share in here):
            assert len(here) == 1, f"{device.id} is exclusive and leased to {len(here)}"
            asked = here[0][1].memory_mb
            if asked is None:
                assert foreign <= max(1024.0, 0.05 * MEMORY_MB), f"foreign processes hold {foreign} MB of {device.id}"
            else:
                assert asked + foreign <= MEMORY_MB, f"{device.id} has no {asked} MB left"
        elif len(here) > 1:
            charged = sum(
                max(MEMORY_MB if share.memory_mb is None else share.memory_mb, seen)
                for (_, share), seen in zip(here, used, strict=True)
            )
            assert charged + foreign <= MEMORY_MB + 1e-6, (
                f"{device.id} is promised {charged} MB, foreign processes hold {foreign}"
            )

    # Readings; those named in `blind` are unknown

    def ram_mb(self) -> dict[tuple[int, int], float]:
        """Return the RAM of programs, by job and attempt."""
        return {
            program.name: program.behavior.ram_mb
            for program in self.programs
            if program.is_running and self.now - (program.began_at or 0.0) >= program.behavior.ram_after_s
        }

    def _cpu_percent(self) -> float:
        running = sum(program.behavior.cpu_percent for program in self.programs if program.is_running)
        return min(100.0, 10.0 + running + sum(spike.cpu_percent for spike in self.load_spikes))

    def _gpu_percent(self, device_id: str) -> float:
        here = (program for program in self.programs if program.is_running and device_id in program.devices)
        return min(
            100.0,
            sum(program.behavior.gpu_percent for program in here)
            + sum(spike.gpu_percent for spike in self.load_spikes),
        )

    def snapshot(self) -> Snapshot:
        stashed = sum(sum(program.stash_mb.values()) for program in self.programs if program.stash_mb)
        taken = sum(self.ram_mb().values()) + sum(spike.ram_mb for spike in self.load_spikes)
        return Snapshot(
            taken_at=self.now,
            host=Host(
                cpu_percent=None if "cpu" in self.blind else self._cpu_percent(),
                memory_total_mb=RAM_MB,
                memory_available_mb=None if "ram" in self.blind else max(0.0, RAM_MB - stashed - taken),
            ),
            devices=tuple(self._read(device) for device in self.devices),
        )

    def _read(self, device: Device) -> Device:
        running = [program for program in self.programs if program.memory_mb.get(device.id)]
        for program in running:
            program.measured_mb[device.id] = max(program.measured_mb.get(device.id, 0.0), program.memory_mb[device.id])
        memory = [(program.pid, program.memory_mb[device.id]) for program in running]
        if self.foreign_mb[device.id]:
            memory.append((FOREIGN_PID, self.foreign_mb[device.id]))
        load_percent = None if "gpu" in self.blind else self._gpu_percent(device.id)
        reading = read_device(device, MEMORY_MB - self.free_mb(device.id), load_percent, memory)
        return replace(reading, fault=self.faults.get(device.id))
