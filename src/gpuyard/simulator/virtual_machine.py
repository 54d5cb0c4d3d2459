"""The simulated machine: time jumps from event to event, and programs take memory and time on devices.

- A program goes through its phases as its work proceeds, slower beside others (`Sharing`); while it imports, it slows
no other. Speeds change only when a program starts to use a device or ends, so each has one next event.
- A program that requests more memory than its device has left fails, as on a real card.
- A suspended program holds no device memory. Both moves of its memory take time: it holds its device memory until it
has left the device, and from the start of its return."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.foreign_load import Smoothed, smooth
from gpuyard.simulated_usage import ROUNDING_MB, out_of_memory_message
from gpuyard.simulator.traces import Member, Sharing, TraceJob, phases_of, utilization_percent

EPOCH = 1_763_000_000.0
HOST_MEMORY_MB = 2_097_152.0
OUT_MB_PER_S, IN_MB_PER_S = 1.6 * 1024, 5.0 * 1024  # measured on an H200 with driver 580
LOAD_HALF_LIFE_S = 5.0  # measured load is smoothed as in the daemon


class VirtualClock:
    """A clock that stands still until it is advanced; implements `ports.Clock`."""

    def __init__(self) -> None:
        self.time = EPOCH
        self.suspended_s = 0.0
        self.shift = 0.0  # what the wall clock is ahead of `now`

    def now(self) -> float:
        return self.time

    monotonic = now

    def asleep(self) -> float:
        return self.suspended_s

    def to_wall(self, at: float) -> float:
        return at + self.shift

    def from_wall(self, at: float) -> float:
        return at - self.shift

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class ScheduledEvent(Struct, eq=False):
    """An action at a time; `cancel` keeps it from happening."""

    action: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class EventQueue:
    """Events in the order of their times; events at the same time happen in the order in which they were added."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._events: list[tuple[float, int, ScheduledEvent]] = []
        self._added = 0

    def add(self, at: float, action: Callable[[], None]) -> ScheduledEvent:
        event = ScheduledEvent(action)
        self._added += 1
        heapq.heappush(self._events, (at, self._added, event))
        return event

    def next_time(self) -> float | None:
        """Return the time of the next event that is not cancelled."""
        while self._events and self._events[0][2].is_cancelled:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else None

    def advance(self, until: float) -> None:
        """Let all events up to `until` happen, and set the clock to it. The clock never goes back."""
        while (at := self.next_time()) is not None and at <= until:
            event = heapq.heappop(self._events)[2]
            self._clock.time = max(self._clock.time, at)
            event.action()
        self._clock.time = max(self._clock.time, until)


def read_device(
    device: Device, used_mb: float, load_percent: float | None, memory_by_pid: Iterable[tuple[int, float]]
) -> Device:
    """Return the device as a probe would read it."""
    total_mb = device.memory_total_mb or 0.0
    used_mb = min(total_mb, max(0.0, used_mb))
    return replace(
        device,
        memory_used_mb=used_mb,
        memory_free_mb=total_mb - used_mb,
        utilization_percent=load_percent,
        processes=tuple([Process(pid=pid, memory_mb=memory_mb) for pid, memory_mb in memory_by_pid]),
    )


def find_shortage(device: Device, used_mb: float, held_mb: float, more_mb: float) -> Shortage:
    """Return the shortage of a program that holds `held_mb` and requests `more_mb`, as PyTorch would report it."""
    total_mb = device.memory_total_mb or 0.0
    free_mb = max(0.0, total_mb - used_mb)
    where, says = ShortageKind.DEVICE, out_of_memory_message(device, more_mb, free_mb)
    return Shortage(where=where, says=says, asked_mb=more_mb, held_mb=held_mb, free_mb=free_mb, total_mb=total_mb)


class MemoryLocation(Enum):
    """Where the memory of a program is: on its devices, in host RAM, or moving between them."""

    ON = auto()
    LEAVING = auto()
    AWAY = auto()
    RETURNING = auto()


class SimulatedProgram:
    """A process of an attempt, or a foreign process. `number` is the position of its job in the trace. `progress_s` is
    the work done by the time `since`. `event` is its next event; a change of speed replaces it. `shortage` is set if it
    ran out of memory."""

    def __init__(self, pid: int, job: TraceJob, number: int, devices: tuple[int, ...], now: float) -> None:
        self.pid, self.job, self.number, self.devices = pid, job, number, devices
        self.member: Member = (job.kind, job.load_percent)
        self.phases = phases_of(job)
        self.phase = -1
        self.progress_s = self.speed = self.held_mb = self.peak_mb = self.paused_s = 0.0
        self.since = self.started_at = self.paused_since = now
        self.speeds = dict.fromkeys(devices, 1.0)
        self.where = MemoryLocation.ON
        self.is_alive = True
        self.suspensions = 0
        self.event: ScheduledEvent | None = None
        self.shortage: Shortage | None = None
        self.on_end: OnEnd | None = None
        self.on_moved: OnMoved | None = None

    @property
    def next_mark_s(self) -> float:
        """The progress at which its next phase starts, or at which it ends."""
        following = self.phase + 1
        return self.phases[following].from_s if following < len(self.phases) else self.job.duration_s

    @property
    def whole_mb(self) -> float:
        """The memory that it holds on all its devices when it is not suspended."""
        return self.phases[self.phase].memory_mb * len(self.devices)

    @property
    def uses_device(self) -> bool:
        """Whether it computes: not while it imports, nor while it is suspended."""
        return self.where is MemoryLocation.ON and self.phase >= (1 if self.job.start_s else 0)

    def update_progress(self, now: float) -> None:
        self.progress_s += (now - self.since) * self.speed
        self.since = now


OnEnd: TypeAlias = Callable[[SimulatedProgram, Outcome], None]
OnMoved: TypeAlias = Callable[[SimulatedProgram], None]


class SimulatedCard:
    """A device and its programs. `busy` is the sum of demand times speed; `memory_mb_s`, `compute_s` are integrals."""

    def __init__(self, device: Device, now: float) -> None:
        self.device = device
        self.total_mb = device.memory_total_mb or 0.0
        self.programs: list[SimulatedProgram] = []
        self.used_mb = self.busy = self.load_percent = self.memory_mb_s = self.compute_s = 0.0
        self.since = self.steady_at = now
        self.smoothed = Smoothed(value=0.0, at=now)
        self.reading: Device | None = None

    def present(self) -> list[SimulatedProgram]:
        """Return the programs that compute now."""
        return [program for program in self.programs if program.uses_device]

    def fits(self, more_mb: float) -> bool:
        return self.used_mb + more_mb <= self.total_mb + ROUNDING_MB

    def change(self, now: float, more_mb: float = 0.0) -> None:
        elapsed = now - self.since
        if elapsed > 0:
            self.memory_mb_s += self.used_mb * elapsed
            self.compute_s += self.busy * elapsed
            self.since = now
        self.used_mb = round(self.used_mb + more_mb, 6)  # so that it is 0 after all programs have ended
        self.reading = None

    def change_load(self, now: float, busy: float) -> None:
        """Set the load after a program has come, gone or changed speed."""
        self.change(now)
        self.busy = busy
        self.smoothed = smooth(self.smoothed, self.load_percent, now, LOAD_HALF_LIFE_S)
        self.load_percent = utilization_percent(program.job.load_percent for program in self.present())
        self.steady_at = now + 4 * LOAD_HALF_LIFE_S

    def read(self) -> Device:
        """Return the device as a probe would read it; cached until it changes."""
        if self.reading is None:
            memory = [(program.pid, program.held_mb) for program in self.programs if program.held_mb]
            self.reading = read_device(self.device, self.used_mb, self.load_percent, memory)
        return self.reading


class VirtualMachine:
    """The whole machine. `changed`: programs with other memory; `unsteady`: cards with a changing smoothed load."""

    def __init__(self, devices: Sequence[Device], sharing: Sharing) -> None:
        self.clock = VirtualClock()
        self.cards = [SimulatedCard(device, self.clock.time) for device in devices]
        self.positions = {device.id: position for position, device in enumerate(devices)}
        self.changed: set[SimulatedProgram] = set()
        self._sharing = sharing
        self._events = EventQueue(self.clock)
        self.next_event, self.advance = self._events.next_time, self._events.advance
        self._pids, self._suspended_mb = 1000, 0.0
        self._loads: dict[str, float | None] = dict.fromkeys(self.positions, 0.0)
        self.unsteady: set[SimulatedCard] = set()

    @property
    def now(self) -> float:
        return self.clock.time

    def snapshot(self) -> Snapshot:
        available_mb = HOST_MEMORY_MB - self._suspended_mb
        host = Host(cpu_percent=0.0, memory_total_mb=HOST_MEMORY_MB, memory_available_mb=available_mb)
        return Snapshot(taken_at=self.now, host=host, devices=tuple([card.read() for card in self.cards]))

    def read_again(self, positions: Iterable[int]) -> None:
        """Read these devices anew in the next snapshot, although nothing has changed on them."""
        for position in positions:
            self.cards[position].reading = None

    def loads(self) -> dict[str, float | None]:
        for card in list(self.unsteady):
            if self.now < card.steady_at:
                smoothed = smooth(card.smoothed, card.load_percent, self.now, LOAD_HALF_LIFE_S)
                self._loads[card.device.id] = smoothed.value or 0.0
            else:
                self._loads[card.device.id] = card.load_percent
                self.unsteady.remove(card)
        return dict(self._loads)

    def _proceed(self, program: SimulatedProgram) -> None:
        program.progress_s, program.since = program.next_mark_s, self.now
        if program.phase + 1 == len(program.phases):
            self._end(program, Outcome(kind=OutcomeKind.SUCCEEDED, status=0))
        elif self._grow(program):
            if program.phase == 1 and program.job.start_s:  # it has imported, and begins to use its devices
                self._change_speeds(program.devices)
            self._schedule(program)

    def _schedule(self, program: SimulatedProgram) -> None:
        left_s = max(0.0, program.next_mark_s - program.progress_s)
        self._set_event(program, program.since + left_s / program.speed, self._proceed)

    def _set_event(self, program: SimulatedProgram, at: float, act: Callable[[SimulatedProgram], None]) -> None:
        if program.event is not None:
            program.event.cancel()
        program.event = self._events.add(at, lambda: act(program))

    def make(self, job: TraceJob, number: int, devices: tuple[int, ...]) -> SimulatedProgram:
        self._pids += 1
        return SimulatedProgram(self._pids, job, number, devices, self.now)

    def start(self, program: SimulatedProgram) -> None:
        """Run the program from now on; it requests its first memory at once."""
        for card in self._cards(program):
            card.programs.append(program)
        if self._grow(program):
            program.speed = 1.0
            self._change_speeds(program.devices)
            self._schedule(program)

    def kill(self, program: SimulatedProgram, outcome: Outcome) -> None:
        if program.is_alive:
            program.update_progress(self.now)
            self._end(program, outcome)

    def _grow(self, program: SimulatedProgram) -> bool:
        """Enter the next phase. Return False if the program ran out of memory."""
        wanted_mb = program.phases[program.phase + 1].memory_mb
        more_mb = wanted_mb - program.held_mb
        full = next((card for card in self._cards(program) if not card.fits(more_mb)), None)
        if full is not None:
            program.shortage = find_shortage(full.device, full.used_mb, program.held_mb, more_mb)
            self._end(program, Outcome(kind=OutcomeKind.FAILED, status=1))
            return False
        program.phase += 1
        self._hold(program, wanted_mb)
        return True

    def _hold(self, program: SimulatedProgram, memory_mb: float) -> None:
        for card in self._cards(program):
            card.change(self.now, memory_mb - program.held_mb)
        program.held_mb = memory_mb
        program.peak_mb = max(program.peak_mb, memory_mb)
        self.changed.add(program)

    def _end(self, program: SimulatedProgram, outcome: Outcome) -> None:
        if program.where is not MemoryLocation.ON:
            program.paused_s += self.now - program.paused_since
            self._suspended_mb -= program.whole_mb if program.where is MemoryLocation.AWAY else 0.0
        self._hold(program, 0.0)
        program.is_alive = False
        if program.event is not None:
            program.event.cancel()
        for card in self._cards(program):
            card.programs.remove(program)
        self._change_speeds(program.devices)
        if program.on_end is not None:
            program.on_end(program, outcome)

    def _cards(self, program: SimulatedProgram) -> list[SimulatedCard]:
        return [self.cards[position] for position in program.devices]

    def _change_speeds(self, positions: Iterable[int]) -> None:
        """Set the speeds of all programs on these devices, after a program has come or gone."""
        touched = set(positions)
        for position in sorted(touched):
            present = self.cards[position].present()
            members = tuple([program.member for program in present])
            for program, speed in zip(present, self._sharing.speeds(members), strict=True):
                program.speeds[position] = speed
                if self._set_speed(program, min(program.speeds.values())):
                    touched.update(program.devices)
        for card in (self.cards[position] for position in touched):
            busy = sum([self._sharing.demand(program.member) * program.speed for program in card.present()])
            card.change_load(self.now, busy)
            self.unsteady.add(card)

    def _set_speed(self, program: SimulatedProgram, speed: float) -> bool:
        """Return whether the speed has changed. A job on several devices is as fast as on the slowest of them."""
        if speed == program.speed:
            return False
        program.update_progress(self.now)
        program.speed = speed
        self._schedule(program)
        return True

    def suspend(self, program: SimulatedProgram) -> None:
        """Stop the program now; its device memory is free when it has been moved."""
        program.update_progress(self.now)
        program.speed = 0.0
        program.where, program.paused_since = MemoryLocation.LEAVING, self.now
        program.suspensions += 1
        self._change_speeds(program.devices)
        self._set_event(program, self.now + program.whole_mb / OUT_MB_PER_S, self._finish_move)

    def resume(self, program: SimulatedProgram) -> bool:
        """Take the program's device memory; it runs on when that has been moved. Return False if too little is free."""
        wanted_mb = program.phases[program.phase].memory_mb
        if not all(card.fits(wanted_mb) for card in self._cards(program)):
            return False
        self._suspended_mb -= program.whole_mb
        self._hold(program, wanted_mb)
        program.where = MemoryLocation.RETURNING
        self._set_event(program, self.now + program.whole_mb / IN_MB_PER_S, self._finish_move)
        return True

    def _finish_move(self, program: SimulatedProgram) -> None:
        if program.where is MemoryLocation.LEAVING:
            program.where = MemoryLocation.AWAY
            self._suspended_mb += program.whole_mb
            self._hold(program, 0.0)
        else:
            program.where = MemoryLocation.ON
            program.since = self.now
            program.paused_s += self.now - program.paused_since
            if not program.uses_device:
                self._set_speed(program, 1.0)
            self._change_speeds(program.devices)
        if program.on_moved is not None:
            program.on_moved(program)
