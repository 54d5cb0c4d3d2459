"""The simulated machine: time jumps from event to event, and programs take memory and time on devices.

- A program goes through its phases as its work proceeds, slower beside others (`Sharing`); while it imports, it slows
no other. Speeds change only when a program starts to use a device or ends, so each has one next event.
- A program that requests more memory than its device has left fails, as on a real card.
- A suspended program holds no device memory. Both moves of its memory take time: it holds its device memory until it
has left the device, and from the start of its return."""

from collections.abc import Callable, Iterable, Sequence

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.machine_snapshot import Device, Host, Snapshot
from gpuyard.simulator.machine_parts import (
    EventQueue,
    MemoryLocation,
    SimulatedCard,
    SimulatedProgram,
    VirtualClock,
    find_shortage,
)
from gpuyard.simulator.traces import Sharing, TraceJob

HOST_MEMORY_MB = 2_097_152.0
# Measured on an H200 with driver 580.
OUT_MB_PER_S, IN_MB_PER_S = 1.6 * 1024, 5.0 * 1024


class VirtualMachine:
    """The whole machine. `changed` are the programs whose memory has changed since the reader last cleared it, and
    `unsteady` the cards whose smoothed load still changes without an event."""

    def __init__(self, devices: Sequence[Device], sharing: Sharing) -> None:
        self.clock = VirtualClock()
        self.cards = [SimulatedCard(device, self.clock.time) for device in devices]
        self.positions = {device.id: position for position, device in enumerate(devices)}
        self.changed: set[SimulatedProgram] = set()
        self._sharing = sharing
        self._events = EventQueue(self.clock)
        self.next_event = self._events.next_time
        self.advance = self._events.advance
        self._pids = 1000
        self._suspended_mb = 0.0
        self._loads: dict[str, float | None] = dict.fromkeys(self.positions, 0.0)
        self.unsteady: set[SimulatedCard] = set()

    @property
    def now(self) -> float:
        return self.clock.time

    def snapshot(self) -> Snapshot:
        """Return the machine as the probes would read it."""
        available_mb = HOST_MEMORY_MB - self._suspended_mb
        host = Host(cpu_percent=0.0, memory_total_mb=HOST_MEMORY_MB, memory_available_mb=available_mb)
        return Snapshot(taken_at=self.now, host=host, devices=tuple([card.read() for card in self.cards]))

    def read_again(self, positions: Iterable[int]) -> None:
        """Read these devices anew in the next snapshot, although nothing has changed on them."""
        for position in positions:
            self.cards[position].reading = None

    def loads(self) -> dict[str, float | None]:
        """Return the smoothed load of each device."""
        for card in list(self.unsteady):
            self._loads[card.device.id] = card.smoothed_percent(self.now)
            if self.now >= card.steady_at:
                self.unsteady.remove(card)
        return dict(self._loads)

    # Time

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
        """Replace the next event of the program."""
        if program.event is not None:
            program.event.cancel()
        program.event = self._events.add(at, lambda: act(program))

    # Programs

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
            self._suspended_mb -= _total_mb(program) if program.where is MemoryLocation.AWAY else 0.0
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

    # Speeds

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

    # Suspending

    def suspend(self, program: SimulatedProgram) -> None:
        """Stop the program now; its device memory is free when it has been moved."""
        program.update_progress(self.now)
        program.speed = 0.0
        program.where, program.paused_since = MemoryLocation.LEAVING, self.now
        program.suspensions += 1
        self._change_speeds(program.devices)
        self._set_event(program, self.now + _total_mb(program) / OUT_MB_PER_S, self._finish_move)

    def resume(self, program: SimulatedProgram) -> bool:
        """Take the program's device memory now; it runs on when its data has been moved. Return False if too little
        memory is free."""
        wanted_mb = program.phases[program.phase].memory_mb
        if not all(card.fits(wanted_mb) for card in self._cards(program)):
            return False
        self._suspended_mb -= _total_mb(program)
        self._hold(program, wanted_mb)
        program.where = MemoryLocation.RETURNING
        self._set_event(program, self.now + _total_mb(program) / IN_MB_PER_S, self._finish_move)
        return True

    def _finish_move(self, program: SimulatedProgram) -> None:
        if program.where is MemoryLocation.LEAVING:
            program.where = MemoryLocation.AWAY
            self._suspended_mb += _total_mb(program)
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


def _total_mb(program: SimulatedProgram) -> float:
    """Return the memory that it holds on all its devices when it is not suspended."""
    return program.phases[program.phase].memory_mb * len(program.devices)
