"""The parts of a simulated machine: cards, programs and their clock."""

import heapq
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Outcome
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.foreign_load import Smoothed, smooth
from gpuyard.simulated_usage import ROUNDING_MB, out_of_memory_message
from gpuyard.simulator.traces import Member, TraceJob, phases_of, utilization_percent

EPOCH = 1_763_000_000.0
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
    def uses_device(self) -> bool:
        """Whether it computes: not while it imports, nor while it is suspended."""
        return self.where is MemoryLocation.ON and self.phase >= (1 if self.job.start_s else 0)

    def update_progress(self, now: float) -> None:
        self.progress_s += (now - self.since) * self.speed
        self.since = now


OnEnd: TypeAlias = Callable[[SimulatedProgram, Outcome], None]
OnMoved: TypeAlias = Callable[[SimulatedProgram], None]


class SimulatedCard:
    """A device and its programs. `busy` is the sum of demand times speed; `memory_mb_s`, `compute_s` are integrals.
    `reading` is the last reading, until the card changes."""

    def __init__(self, device: Device, now: float) -> None:
        self.device = device
        self.total_mb = device.memory_total_mb or 0.0
        self.programs: list[SimulatedProgram] = []
        self.used_mb = self.busy = self.load_percent = self.memory_mb_s = self.compute_s = 0.0
        self.since = self.steady_at = now
        self._smoothed = Smoothed(value=0.0, at=now)
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
        self._smoothed = smooth(self._smoothed, self.load_percent, now, LOAD_HALF_LIFE_S)
        self.load_percent = utilization_percent(program.job.load_percent for program in self.present())
        self.steady_at = now + 4 * LOAD_HALF_LIFE_S

    def smoothed_percent(self, now: float) -> float:
        """Return the smoothed load, as the daemon would measure it."""
        if now >= self.steady_at:
            return self.load_percent
        return smooth(self._smoothed, self.load_percent, now, LOAD_HALF_LIFE_S).value or 0.0

    def read(self) -> Device:
        """Return the device as a probe would read it; cached until it changes."""
        if self.reading is None:
            memory = [(program.pid, program.held_mb) for program in self.programs if program.held_mb]
            self.reading = read_device(self.device, self.used_mb, self.load_percent, memory)
        return self.reading
