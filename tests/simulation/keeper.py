"""The keeper of the crash tests: it reaps programs, starts the next ones of their slices, and reports late.

It behaves as engines/local/keeper.py: one for each daemon, which it outlives. It may stop at any moment, also between
the moments at which it writes the lines of an end and of the next start, and looks whether that may still start.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuyard.engines.common.spawn_program import RETURNED
from tests.simulation.programs import Program

if TYPE_CHECKING:
    from tests.simulation.world import World

# As the keeper's `_REPORT_WITHIN_S`.
REPORT_WITHIN_S = 0.025
NO_PROCESS = "unbegun-process-eagain"


@dataclass(frozen=True, kw_only=True)
class KeeperHabits:
    """How often, per start or report, a keeper does what is rare: it stops for up to `stops_s`, a process cannot be
    started, a report arrives in two parts."""

    stops: float = 0.0
    stops_s: float = 0.0
    trouble: float = 0.0
    reports_in_parts: float = 0.0


CALM = KeeperHabits()


@dataclass(frozen=True)
class Line:
    """What a keeper reports: the program has ended, or `is_start`: its turn in a slice has come."""

    program: Program
    is_start: bool = False


class SimulatedKeeper:
    """`arrived` is what its daemon can read."""

    def __init__(self, world: "World", habits: KeeperHabits) -> None:
        self.has_daemon = True
        self.is_dead = False
        self.arrived: list[Line] = []
        self._world = world
        self._habits = habits
        self._slices: list[deque[Program]] = []  # what has not begun
        self._withdrawn: set[tuple[int, int]] = set()  # sent by the daemon, and not read
        self._unsent: list[Line] = []
        self._has_report_due = False
        self._stopped_until: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        world.keepers.append(self)

    # The daemon's side

    def start(self, programs: list[Program]) -> None:
        """Start a slice. (A stopped keeper starts it later; here the daemon leaves one that is stopped.)"""
        first, *rest = programs
        self._slices.append(deque(rest))
        for program in programs:
            program.rest = self._slices[-1]
        self._world.begin(first)

    def withdraw(self, name: tuple[int, int]) -> None:
        self._withdrawn.add(name)
        self._world.after(self._world.random("ask").choice((0.0, 0.002)), lambda: self._do(self._receive))

    def lose_daemon(self) -> None:
        """The keeper finds the end of its connection at once, or a little later if it has nothing else to do."""
        self.has_daemon = False
        random = self._world.random("notice")
        self._world.after(random.choice((0.0, random.uniform(0.0, 0.5))), self.greet)

    def greet(self) -> None:
        """Greet another daemon, after what the first one sent, and its end."""
        self._do(self._receive)

    def _receive(self) -> None:
        """Carry out what the daemon sent."""
        for rest in self._slices:
            for program in [each for each in rest if each.name in self._withdrawn or not self.has_daemon]:
                self._return(program)
        self._withdrawn.clear()

    def _return(self, program: Program) -> None:
        program.rest.remove(program)
        self._fail(program, RETURNED)

    # Life

    def stop(self, seconds: float) -> None:
        """Do nothing for some time, as after SIGSTOP."""
        until = self._world.now + seconds
        self._stopped_until = max(until, self._stopped_until or until)
        self._world.after(seconds, self._go_on)

    def _go_on(self) -> None:
        if self._stopped_until is not None and self._world.now >= self._stopped_until:
            self._stopped_until = None
        while self._waiting and self._stopped_until is None:
            self._waiting.popleft()()

    def _do(self, action: Callable[[], None]) -> None:
        """Act now, or when it goes on. Until then, what it does comes in order."""
        if self._stopped_until is None and not self._waiting:
            action()
        else:
            self._waiting.append(action)

    def _do_next(self, action: Callable[[], None]) -> None:
        """Continue what it does, maybe after a stop."""
        random = self._world.random("stop")
        if random.random() < self._habits.stops:
            self.stop(random.uniform(0.0, self._habits.stops_s))
            self._waiting.appendleft(action)
        else:
            action()

    def die(self) -> None:
        """End as by SIGKILL. What it has written to the journal stays, and what its daemon can read."""
        self.is_dead = True
        self._slices.clear()
        self._unsent.clear()
        self._waiting.clear()

    # Ends

    def handle_end(self, program: Program, entry: str) -> None:
        self._do(lambda: self._reap(program, entry))

    def _reap(self, program: Program, entry: str) -> None:
        if not program.is_supervised:  # killed meanwhile
            return
        rest = program.rest
        if program.behavior.lingers_s and entry != "unbegun":  # what it has left behind has the lease
            while rest:
                self._return(rest[0])
        self._world.note_end(program, entry)
        self._report(Line(program), is_last=not rest)
        if rest:
            self._write_start(program, rest[0])

    def _write_start(self, before: Program, program: Program) -> None:
        """Write the line of the next program, in one piece with that of the end."""
        program.after = before
        self._world.write_start(program)
        self._do_next(lambda: self._begin(program))

    def _begin(self, program: Program) -> None:
        rest = program.rest
        self._receive()
        if not rest or rest[0] is not program:
            if rest:
                self._write_start(program.after or program, rest[0])
            return
        rest.popleft()
        if self._world.random("process").random() < self._habits.trouble:
            while rest:
                self._return(rest[0])
            self._fail(program, NO_PROCESS)
            return
        self._unsent.append(Line(program, is_start=True))
        self._world.begin(program)

    def _fail(self, program: Program, word: str) -> None:
        if program.is_supervised:
            self._world.note_end(program, word)
            self._report(Line(program), is_last=True)

    # Reports

    def _report(self, line: Line, *, is_last: bool) -> None:
        """Report at once, or within 25 ms if the slice goes on."""
        if not self.has_daemon:
            return
        line.program.is_unreported = True
        self._unsent.append(line)
        if is_last:
            self._send_all()
        elif not self._has_report_due:
            self._has_report_due = True
            self._world.after(REPORT_WITHIN_S, lambda: self._do(self._send_all))

    def _send_all(self) -> None:
        self._has_report_due = False
        count, random = len(self._unsent), self._world.random("part")
        if count > 1 and random.random() < self._habits.reports_in_parts:
            count = random.randint(1, count - 1)
            count += self._unsent[count].is_start  # an end and the start after it fit into one message
            self._world.after(0.001, lambda: self._do(self._send_all))
        self.arrived += self._unsent[:count]
        del self._unsent[:count]
