"""The simulated machine: a clock, devices, programs under supervisors, strangers, and what survives a daemon.

Nothing here knows the controller. A program's nature (how long it runs, how it ends, whether it heeds SIGTERM) follows
from the seed, its command and the number of its attempt, so it is the same whatever happened before.
"""

import heapq
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gpuyard.core.model import Device, Holder, Host, Lease, Share, Snapshot, Ticket, Vendor
from gpuyard.engines.journal import BEGAN

EPOCH = 1_763_000_000.0
MEMORY_MB = 24_576.0
Action = Callable[[], None]
Event = tuple[float, str, Any]


class VirtualClock:
    def __init__(self) -> None:
        self.time = EPOCH

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass(frozen=True, kw_only=True)
class Nature:
    """`lost_after_s` is when its supervisor is killed, `is_orphan` whether the program goes on without it; something of
    the job's keeps the lease for `lingers_s` after its end."""

    runs_s: float
    word: str = "0"
    heeds_term: bool = True
    term_s: float = 0.0
    lost_after_s: float | None = None
    is_orphan: bool = False
    lingers_s: float = 0.0
    memory_share: float = 0.9
    allocates_after_s: float = 0.0


def plain_nature(words: tuple[str, ...], _: int) -> Nature:
    """`run SECONDS [STATUS]`"""
    return Nature(runs_s=float(words[1]), word=words[2] if len(words) > 2 else "0")


def wild_nature(seed: int) -> Callable[[tuple[str, ...], int], Nature]:
    def nature(words: tuple[str, ...], attempt: int) -> Nature:
        random = Random(f"{seed} {words} {attempt}")
        runs_s = random.choice((0.0, random.uniform(0.0, 0.5), random.uniform(1.0, 8.0), random.uniform(4.0, 25.0)))
        is_lost = random.random() < 0.06
        return Nature(
            runs_s=runs_s,
            word=random.choices(("0", "1", "3", "139", "no-program"), (75, 12, 5, 5, 3))[0],
            heeds_term=random.random() < 0.75,
            term_s=random.choice((0.0, random.uniform(0.0, 3.0))),
            lost_after_s=random.uniform(0.0, runs_s) if is_lost else None,
            is_orphan=random.random() < 0.5,
            lingers_s=random.uniform(0.0, 6.0) if random.random() < 0.08 else 0.0,
            memory_share=random.choice((0.0, 0.5, 0.9, 1.0, 1.2)),
            allocates_after_s=random.uniform(0.0, 2.0),
        )

    return nature


@dataclass(kw_only=True)
class Program:
    """A supervisor and what it runs. `word` is what it left in the journal; `fate` says it of those that left none."""

    job_id: int
    attempt: int
    pid: int
    born_at: float
    boot: int
    words: tuple[str, ...]
    nature: Nature
    lease_id: str | None
    began_at: float | None = None
    ended_at: float | None = None
    is_supervised: bool = True
    is_running: bool = False
    word: str | None = None
    fate: str | None = None

    @property
    def name(self) -> tuple[int, int]:
        return self.job_id, self.attempt


@dataclass(kw_only=True)
class Granted:
    """A lease lives while somebody keeps it."""

    lease: Lease
    keepers: set[str] = field(default_factory=set)


class World:
    def __init__(self, seed: int, nature_of: Callable[[tuple[str, ...], int], Nature], devices: int = 2) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.boot = 1
        self.device_ids = tuple(f"SIM-{number}" for number in range(devices))
        self.programs: list[Program] = []
        self.journal: list[tuple[int, int, int, str]] = []
        self.granted: dict[str, Granted] = {}
        self.tickets: dict[str, tuple[Ticket, str]] = {}
        self.strangers_mb = dict.fromkeys(self.device_ids, 0.0)
        self.faults: dict[str, str] = {}
        self.log: list[Event] = []
        self.ledger_woke = False
        self._nature_of = nature_of
        self._agenda: list[tuple[float, int, Action]] = []
        self._numbers: dict[str, int] = {}

    # Time and chance

    @property
    def now(self) -> float:
        return self.clock.time

    def number(self, kind: str) -> int:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self._numbers[kind]

    def random(self, kind: str) -> Random:
        """A new one each time; those of one kind do not depend on how many of another were drawn."""
        return Random(f"{self.seed} {kind} {self.number('random ' + kind)}")

    def tell(self, kind: str, what: Any) -> None:
        self.log.append((round(self.now - EPOCH, 6), kind, what))

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, self.number("agenda"), action))

    def next_event(self) -> float | None:
        return self._agenda[0][0] if self._agenda else None

    def advance(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            at, _, action = heapq.heappop(self._agenda)
            self.clock.time = max(self.now, at)
            action()
        self.clock.time = max(self.now, until)

    # Programs

    def spawn(self, job_id: int, attempt: int, words: tuple[str, ...], lease_id: str | None) -> Program:
        program = Program(
            job_id=job_id,
            attempt=attempt,
            pid=100 + self.number(f"pid of boot {self.boot}"),
            born_at=self.now,
            boot=self.boot,
            words=words,
            nature=self._nature_of(words, attempt),
            lease_id=lease_id,
        )
        self.programs.append(program)
        if lease_id is not None:
            self.granted[lease_id].keepers.add(f"pid {program.pid}")
        return program

    def begin(self, program: Program) -> None:
        if not program.is_supervised:
            return
        nature = program.nature
        program.began_at, program.is_running = self.now, True
        self.journal.append((program.job_id, program.attempt, program.pid, BEGAN))
        self.tell("begins", program.name)
        self.after(nature.runs_s, lambda: self.exit(program, nature.word))
        if nature.lost_after_s is not None:
            self.after(nature.lost_after_s, lambda: self._lose(program))

    def leave_unbegun(self, program: Program) -> None:
        if program.is_supervised and program.began_at is None:
            self.exit(program, "unbegun")

    def kill_supervisor(self, program: Program, fate: str) -> None:
        if program.is_supervised:
            program.fate = fate
            self._bury(program)

    def signal(self, job_id: int, attempt: int, signum: int) -> int:
        """Reaches the programs of the attempt, not their supervisors."""
        found = [program for program in self.programs if program.name == (job_id, attempt) and program.is_running]
        for program in found:
            self.tell("signal", (program.name, int(signum)))
            if signum == signal.SIGKILL:
                self.exit(program, "137")
            elif program.nature.heeds_term:
                self.after(program.nature.term_s, lambda program=program: self.exit(program, "143"))  # type: ignore[misc]
        return len(found)

    def exit(self, program: Program, word: str) -> None:
        if program.began_at is not None and not program.is_running:
            return
        program.is_running = False
        if program.is_supervised:
            program.word = word
            self.journal.append((program.job_id, program.attempt, program.pid, word))
        self._bury(program)

    def _lose(self, program: Program) -> None:
        if program.is_supervised:
            program.is_running = program.is_running and program.nature.is_orphan
            self.kill_supervisor(program, "lost")

    def _bury(self, program: Program) -> None:
        if program.is_supervised:
            program.is_supervised = False
            program.ended_at = self.now
            self.tell("over", (program.name, program.word or program.fate))
        if not program.is_running and program.lease_id is not None:
            keeper, lease_id = f"pid {program.pid}", program.lease_id
            lingers_s = program.nature.lingers_s if program.began_at is not None else 0.0
            if lingers_s:
                self.after(lingers_s, lambda: self.let_go(lease_id, keeper))
            else:
                self.let_go(lease_id, keeper)

    def reboot(self) -> None:
        self.tell("reboot", self.boot)
        for program in self.programs:
            if program.is_supervised or program.is_running:
                program.is_supervised = program.is_running = False
                program.fate, program.ended_at = "rebooted", self.now
        self.granted.clear()
        self.tickets.clear()
        self.boot += 1

    # Leases

    def grant(self, holder: Holder, shares: tuple[Share, ...], keeper: str) -> Granted:
        lease = Lease(id=f"lease-{self.number('lease')}", holder=holder, shares=shares, since=self.now)
        self.granted[lease.id] = Granted(lease=lease, keepers={keeper})
        for share in shares:
            self._check_fit(share.device_id)
        self.tell("granted", (holder.label, tuple(share.device_id for share in shares)))
        return self.granted[lease.id]

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
        return tuple(granted.lease for granted in self.granted.values())

    def measured(self) -> dict[tuple[str, str], float | None]:
        """What each lease's programs hold on each of its devices."""
        found: dict[tuple[str, str], float | None] = {
            (lease.id, share.device_id): 0.0 for lease in self.leases() for share in lease.shares
        }
        for program in self.programs:
            if program.is_running and program.lease_id in self.granted and self._has_allocated(program):
                for share in self.granted[program.lease_id].lease.shares:
                    asked = MEMORY_MB if share.memory_mb is None else share.memory_mb
                    used = min(MEMORY_MB, asked * program.nature.memory_share)
                    found[program.lease_id, share.device_id] = used
        return found

    def _has_allocated(self, program: Program) -> bool:
        return program.began_at is not None and self.now >= program.began_at + program.nature.allocates_after_s

    def _check_fit(self, device_id: str) -> None:
        """By the rule itself, not by the code that is to keep it."""
        here = [(lease, share) for lease in self.leases() if (share := lease.on(device_id)) is not None]
        strangers = self.strangers_mb[device_id]
        if any(share.is_exclusive for _, share in here):
            assert len(here) == 1, f"{device_id} is somebody's alone, and leased to {len(here)}"
            asked = here[0][1].memory_mb
            if asked is None:
                assert strangers <= max(1024.0, 0.05 * MEMORY_MB), f"strangers hold {strangers} MB of {device_id}"
            else:
                assert asked + strangers <= MEMORY_MB
            return
        measured = self.measured()
        charged = sum(max(share.memory_mb or 0.0, measured[lease.id, device_id] or 0.0) for lease, share in here)
        assert charged + strangers <= MEMORY_MB, f"{device_id} is promised {charged} MB, strangers hold {strangers}"

    # What a probe sees

    def snapshot(self) -> Snapshot:
        used = dict(self.strangers_mb)
        for (_, device_id), memory_mb in self.measured().items():
            used[device_id] += memory_mb or 0.0
        return Snapshot(
            taken_at=self.now,
            host=Host(cpu_percent=10.0, memory_available_mb=64_000.0),
            devices=tuple(self._device(index, device_id, used) for index, device_id in enumerate(self.device_ids)),
        )

    def _device(self, index: int, device_id: str, used: dict[str, float]) -> Device:
        used_mb = min(MEMORY_MB, used[device_id])
        return Device(
            id=device_id,
            vendor=Vendor.SIMULATED,
            index=index,
            memory_total_mb=MEMORY_MB,
            memory_used_mb=used_mb,
            memory_free_mb=MEMORY_MB - used_mb,
            fault=self.faults.get(device_id),
        )
