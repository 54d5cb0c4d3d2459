"""What the simulated machine is made of: its clock, its cards, and the programs on them."""

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias

from msgspec.structs import replace

from gpuyard.core.job.job import Outcome
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.core.scheduling.load_gates import Smoothed, smooth
from gpuyard.core.snapshot import Device, Process
from gpuyard.simulator.sharing_slowdown import Member, utilization_percent
from gpuyard.simulator.trace_file import TraceJob, phases_of

EPOCH = 1_763_000_000.0
# How busy a device is seen to be is smoothed as the daemon does it; after so many half-lives it is what it is.
LOAD_HALF_LIFE_S = 5.0
_CALM_AFTER_S = 4 * LOAD_HALF_LIFE_S
# What is taken in many small steps adds up to a little more or less than the whole.
_ROUNDING_MB = 0.001


class VirtualClock:
    """Implements `ports.Clock`."""

    def __init__(self) -> None:
        self.time = EPOCH

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class MemoryLocation(Enum):
    """Where a program's memory is: on its devices, in host RAM, or on the way from one to the other."""

    ON = auto()
    LEAVING = auto()
    AWAY = auto()
    RETURNING = auto()


class SimulatedProgram:
    """A process of an attempt, or a stranger's. `number` is its job's place in the trace.

    `progress_s` is the work that was done by `since`. An event of its counts while its `turn` is the program's: a
    change of speed makes a new one. It has a `shortage` where it ran out of memory.
    """

    __slots__ = (
        "devices", "held_mb", "is_alive", "job", "member", "number", "on_end", "on_moved", "paused_s", "paused_since",
        "peak_mb", "phase", "phases", "pid", "progress_s", "shortage", "since", "speed", "speeds", "started_at",
        "suspensions", "turn", "where",
    )  # fmt: skip

    def __init__(self, pid: int, job: TraceJob, number: int, devices: tuple[int, ...], now: float) -> None:
        self.pid = pid
        self.job = job
        self.number = number
        self.devices = devices
        self.member: Member = (job.kind, job.load_percent)
        self.phases = phases_of(job)
        self.phase = -1
        self.progress_s = self.speed = self.held_mb = self.peak_mb = self.paused_s = 0.0
        self.since = self.started_at = self.paused_since = now
        self.speeds = dict.fromkeys(devices, 1.0)
        self.where = MemoryLocation.ON
        self.is_alive = True
        self.turn = self.suspensions = 0
        self.shortage: Shortage | None = None
        self.on_end: OnEnd | None = None
        self.on_moved: OnMoved | None = None

    @property
    def next_mark_s(self) -> float:
        """How far into its work its next phase begins, or its end is."""
        following = self.phase + 1
        return self.phases[following].from_s if following < len(self.phases) else self.job.duration_s

    def settle(self, now: float) -> None:
        self.progress_s += (now - self.since) * self.speed
        self.since = now


OnEnd: TypeAlias = Callable[[SimulatedProgram, Outcome], None]
OnMoved: TypeAlias = Callable[[SimulatedProgram], None]


class SimulatedCard:
    """A device and who is on it. `busy` is the sum of demands times speeds; the integrals are over time."""

    __slots__ = (
        "_seen", "_smoothed", "busy", "calm_at", "compute_s", "device", "load_percent", "memory_mb_s", "programs",
        "since", "total_mb", "used_mb",
    )  # fmt: skip

    def __init__(self, device: Device, now: float) -> None:
        self.device = device
        self.total_mb = device.memory_total_mb or 0.0
        self.programs: list[SimulatedProgram] = []
        self.used_mb = self.busy = self.load_percent = self.memory_mb_s = self.compute_s = 0.0
        self.since = self.calm_at = now
        self._smoothed = Smoothed(value=0.0, at=now)
        self._seen: Device | None = None

    def present(self) -> list[SimulatedProgram]:
        return [program for program in self.programs if program.where is MemoryLocation.ON]

    def fits(self, more_mb: float) -> bool:
        return self.used_mb + more_mb <= self.total_mb + _ROUNDING_MB

    def change(self, now: float, more_mb: float = 0.0) -> None:
        elapsed = now - self.since
        if elapsed > 0:
            self.memory_mb_s += self.used_mb * elapsed
            self.compute_s += self.busy * elapsed
            self.since = now
        self.used_mb = round(self.used_mb + more_mb, 6)  # or what all have given back would not be zero
        self._seen = None

    def change_load(self, now: float, busy: float) -> None:
        """After somebody came or went, or changed speed."""
        self.change(now)
        self.busy = busy
        self._smoothed = self._smooth(now)
        self.load_percent = utilization_percent(program.job.load_percent for program in self.present())
        self.calm_at = now + _CALM_AFTER_S

    def smoothed_percent(self, now: float) -> float:
        """How busy it has been of late."""
        return self.load_percent if now >= self.calm_at else self._smooth(now).value or 0.0

    def _smooth(self, now: float) -> Smoothed:
        return smooth(self._smoothed, self.load_percent, now, LOAD_HALF_LIFE_S)

    def look(self) -> Device:
        """What a probe would say, made anew only where something has changed."""
        if self._seen is None:
            used_mb = min(self.total_mb, max(0.0, self.used_mb))
            self._seen = replace(
                self.device,
                memory_used_mb=used_mb,
                memory_free_mb=self.total_mb - used_mb,
                utilization_percent=self.load_percent,
                processes=tuple([Process(pid=one.pid, memory_mb=one.held_mb) for one in self.programs if one.held_mb]),
            )
        return self._seen
