"""The simulated machine: time jumps from event to event, and programs take memory and time on devices.

- A program goes through its phases as its work proceeds; beside others it proceeds at the speed that `sharing` says.
  Speeds change only when somebody comes or goes, so each program has one next event, made anew when its speed changes.
- Whoever asks for more memory than a device has left fails, as on a real card, whoever holds the rest.
- A suspended program holds no device memory and does not proceed. It takes its time to leave, holding its memory until
  it has left, and to come back, holding it from the beginning.
"""

import heapq
from collections.abc import Iterable, Sequence

from gpuyard.core.job.job import Outcome, OutcomeKind
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.snapshot import Device, Host, Snapshot
from gpuyard.simulator.machine_parts import MemoryLocation, SimulatedCard, SimulatedProgram, VirtualClock
from gpuyard.simulator.sharing_slowdown import Sharing
from gpuyard.simulator.trace_file import TraceJob

HOST_MEMORY_MB = 2_097_152.0
# As measured on an H200 with driver 580.
OUT_MB_PER_S, IN_MB_PER_S = 1.6 * 1024, 5.0 * 1024
_FIRST_PID = 1000
_DONE = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
_FAILED = Outcome(kind=OutcomeKind.FAILED, status=1)


class VirtualMachine:
    """`changed` are the programs whose memory is not what it was when somebody last emptied it."""

    def __init__(self, devices: Sequence[Device], sharing: Sharing) -> None:
        self.clock = VirtualClock()
        self.cards = [SimulatedCard(device, self.clock.time) for device in devices]
        self.places = {device.id: place for place, device in enumerate(devices)}
        self.changed: set[SimulatedProgram] = set()
        self._sharing = sharing
        self._agenda: list[tuple[float, int, int, SimulatedProgram]] = []
        self._events = 0
        self._pids = _FIRST_PID
        self._away_mb = 0.0
        self._loads: dict[str, float | None] = dict.fromkeys(self.places, 0.0)
        self._excited: set[SimulatedCard] = set()

    @property
    def now(self) -> float:
        return self.clock.time

    def snapshot(self) -> Snapshot:
        """What a probe would see."""
        host = Host(
            cpu_percent=0.0,
            memory_total_mb=HOST_MEMORY_MB,
            memory_available_mb=HOST_MEMORY_MB - self._away_mb,
        )
        return Snapshot(taken_at=self.now, host=host, devices=tuple([card.look() for card in self.cards]))

    def loads(self) -> dict[str, float | None]:
        """How busy each device has been of late."""
        for card in list(self._excited):
            self._loads[card.device.id] = card.smoothed_percent(self.now)
            if self.now >= card.calm_at:
                self._excited.remove(card)
        return dict(self._loads)

    @property
    def is_calm(self) -> bool:
        """Whether a later look would see the same loads, if nothing happens."""
        return not self._excited

    # Time

    def next_event(self) -> float | None:
        """When something happens next; what was overtaken is forgotten."""
        agenda = self._agenda
        while agenda and agenda[0][2] != agenda[0][3].turn:
            heapq.heappop(agenda)
        return agenda[0][0] if agenda else None

    def advance(self, until: float) -> None:
        """Lets everything happen that happens up to then."""
        while (at := self.next_event()) is not None and at <= until:
            program = heapq.heappop(self._agenda)[3]
            self.clock.time = max(self.now, at)
            if program.where is MemoryLocation.ON:
                self._proceed(program)
            else:
                self._arrive(program)
        self.clock.time = max(self.now, until)

    def _proceed(self, program: SimulatedProgram) -> None:
        program.progress_s, program.since = program.next_mark_s, self.now
        if program.phase + 1 == len(program.phases):
            self._end(program, _DONE)
        elif self._grow(program):
            self._schedule(program)

    def _schedule(self, program: SimulatedProgram) -> None:
        left_s = max(0.0, program.next_mark_s - program.progress_s)
        self._call(program, program.since + left_s / program.speed)

    def _call(self, program: SimulatedProgram, at: float) -> None:
        program.turn += 1
        self._events += 1
        heapq.heappush(self._agenda, (at, self._events, program.turn, program))

    # Programs

    def make(self, job: TraceJob, number: int, devices: tuple[int, ...]) -> SimulatedProgram:
        self._pids += 1
        return SimulatedProgram(self._pids, job, number, devices, self.now)

    def begin(self, program: SimulatedProgram) -> None:
        """It runs from now on, and asks for its first memory at once."""
        for card in self._cards(program):
            card.programs.append(program)
        if self._grow(program):
            self._change_speeds(program.devices)

    def kill(self, program: SimulatedProgram, outcome: Outcome) -> None:
        if program.is_alive:
            program.settle(self.now)
            self._end(program, outcome)

    def _grow(self, program: SimulatedProgram) -> bool:
        """Into its next phase; whether it could."""
        wanted_mb = program.phases[program.phase + 1].memory_mb
        more_mb = wanted_mb - program.held_mb
        full = next((card for card in self._cards(program) if not card.fits(more_mb)), None)
        if full is not None:
            program.shortage = _shortage(full, program, more_mb)
            self._end(program, _FAILED)
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
            self._away_mb -= _total_mb(program) if program.where is MemoryLocation.AWAY else 0.0
        self._hold(program, 0.0)
        program.is_alive = False
        program.turn += 1
        for card in self._cards(program):
            card.programs.remove(program)
        self._change_speeds(program.devices)
        if program.on_end is not None:
            program.on_end(program, outcome)

    def _cards(self, program: SimulatedProgram) -> list[SimulatedCard]:
        return [self.cards[place] for place in program.devices]

    # Speeds

    def _change_speeds(self, places: Iterable[int]) -> None:
        """For everybody on these devices, after somebody came or went."""
        touched = set(places)
        for place in sorted(touched):
            present = self.cards[place].present()
            for program, speed in zip(present, self._sharing.speeds(_members(present)), strict=True):
                program.speeds[place] = speed
                if self._set_speed(program, min(program.speeds.values())):
                    touched.update(program.devices)
        for place in touched:
            present = self.cards[place].present()
            busy = sum([self._sharing.demand(program.member) * program.speed for program in present])
            self.cards[place].change_load(self.now, busy)
            self._excited.add(self.cards[place])

    def _set_speed(self, program: SimulatedProgram, speed: float) -> bool:
        """Whether that is another one than before. A job on several devices is as fast as it is on the slowest."""
        if speed == program.speed:
            return False
        program.settle(self.now)
        program.speed = speed
        self._schedule(program)
        return True

    # Suspending

    def suspend(self, program: SimulatedProgram) -> None:
        """It stops now, and its memory is free when that has been moved."""
        program.settle(self.now)
        program.speed = 0.0
        program.where, program.paused_since = MemoryLocation.LEAVING, self.now
        program.suspensions += 1
        self._change_speeds(program.devices)
        self._call(program, self.now + _total_mb(program) / OUT_MB_PER_S)

    def resume(self, program: SimulatedProgram) -> bool:
        """It takes its memory now, and goes on when that has been moved; whether there was enough to take."""
        wanted_mb = program.phases[program.phase].memory_mb
        if not all(card.fits(wanted_mb) for card in self._cards(program)):
            return False
        self._away_mb -= _total_mb(program)
        self._hold(program, wanted_mb)
        program.where = MemoryLocation.RETURNING
        self._call(program, self.now + _total_mb(program) / IN_MB_PER_S)
        return True

    def _arrive(self, program: SimulatedProgram) -> None:
        """In host RAM, or back on its devices."""
        if program.where is MemoryLocation.LEAVING:
            program.where = MemoryLocation.AWAY
            self._away_mb += _total_mb(program)
            self._hold(program, 0.0)
        else:
            program.where = MemoryLocation.ON
            program.since = self.now
            program.paused_s += self.now - program.paused_since
            self._change_speeds(program.devices)
        if program.on_moved is not None:
            program.on_moved(program)


def _members(programs: Sequence[SimulatedProgram]) -> tuple[tuple[str, float], ...]:
    return tuple([program.member for program in programs])


def _total_mb(program: SimulatedProgram) -> float:
    """What it has on its devices, or would have."""
    return program.phases[program.phase].memory_mb * len(program.devices)


def _shortage(card: SimulatedCard, program: SimulatedProgram, more_mb: float) -> Shortage:
    """In the words of a framework that is told by the driver."""
    free_mb = max(0.0, card.total_mb - card.used_mb)
    text = (
        f"CUDA out of memory. Tried to allocate {more_mb / 1024:.2f} GiB. GPU {card.device.index} has a total capacity "
        f"of {card.total_mb / 1024:.2f} GiB of which {free_mb / 1024:.2f} GiB is free."
    )
    return Shortage(
        where=ShortageKind.DEVICE,
        says=text,
        asked_mb=more_mb,
        held_mb=program.held_mb,
        free_mb=free_mb,
        total_mb=card.total_mb,
    )
