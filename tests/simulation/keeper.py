"""The keeper of the crash tests: it reaps programs, starts prefetched launches in their place, and reports late.

It behaves as engines/local/keeper.py: one for each daemon, which it outlives. It may stop at any moment, also between
the moments at which it takes a launch, writes the line of its journal, and looks whether the daemon lives.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuyard.engines.common.unbegun_words import RETURNED
from gpuyard.ports import Launch
from tests.simulation.programs import Program

if TYPE_CHECKING:
    from tests.simulation.world import World

# As the keeper's `_REPORT_WITHIN_S`.
REPORT_WITHIN_S = 0.025
NO_PROCESS = "unbegun-process-eagain"


@dataclass(frozen=True, kw_only=True)
class KeeperHabits:
    """How often, per successor or report, a keeper does what is rare: it stops for up to `stops_s`, a process cannot be
    started, a report arrives in two parts, a launch of another group is taken. `room`: launches in its prefetch queue.
    """

    stops: float = 0.0
    stops_s: float = 0.0
    trouble: float = 0.0
    reports_in_parts: float = 0.0
    mixes_groups: float = 0.0
    room: int = 50


CALM = KeeperHabits()


@dataclass(frozen=True)
class Line:
    """What a keeper reports: the program has ended, or `is_start`: it has taken the place of another."""

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
        self._is_open = True
        self._queue: deque[Launch] = deque()
        self._unsent: list[Line] = []
        self._has_report_due = self._is_asked = False
        self._stopped_until: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        world.keepers.append(self)

    # The daemon's side

    def put(self, launch: Launch) -> bool:
        """Return False if there is no room for it."""
        has_room = len(self._queue) < self._habits.room
        if has_room:
            self._queue.append(launch)
        return has_room

    def prefetched(self) -> set[int]:
        return {launch.job_id for launch in self._queue}

    def take_back(self, most: int | None) -> list[Launch]:
        count = len(self._queue) if most is None else min(most, len(self._queue))
        return [self._queue.popleft() for _ in range(count)]

    def ask_to_report(self) -> None:
        """It may be stopped, and is asked again and again."""
        if not self._is_asked:
            self._is_asked = True
            self._world.after(self._world.random("ask").choice((0.0, 0.002)), lambda: self._do(self._send_all))

    def lose_daemon(self) -> None:
        """The kernel tells the keeper at once that its daemon has died, and it looks there a little later."""
        self.has_daemon = False
        random = self._world.random("notice")
        self._world.after(random.choice((0.0, random.uniform(0.0, 0.5))), self.greet)

    def greet(self) -> None:
        """Greet another daemon: from then on nothing is taken from the prefetch queue."""
        self._do(self._close)

    def _close(self) -> None:
        self._is_open = False

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
        self.is_dead, self._is_open = True, False
        self._queue.clear()
        self._unsent.clear()
        self._waiting.clear()

    # Ends

    def handle_end(self, program: Program, entry: str) -> None:
        self._do(lambda: self._reap(program, entry))

    def _reap(self, program: Program, entry: str) -> None:
        if not program.is_supervised:  # killed meanwhile
            return
        launch = self._take(program.group) if entry == "0" and not program.behavior.lingers_s else None
        successor = None if launch is None else self._world.spawn_successor(program, launch)
        self._world.note_end(program, entry)
        self._report(Line(program), is_followed=successor is not None)
        if successor is not None and launch is not None:
            self._unsent.append(Line(successor, is_start=True))
            has_same_group = launch.group == program.group
            self._do_next(lambda: self._write_line(successor) if has_same_group else self._fail(successor, RETURNED))

    def _take(self, group: int) -> Launch | None:
        """Return the first launch if it is of this group; rarely also if not: the daemon put it there at that very
        moment, in place of another one."""
        if not group or not self._is_open or not self._queue:
            return None
        is_alike = self._queue[0].group == group
        is_wrong = not is_alike and self._world.random("wrong group").random() < self._habits.mixes_groups
        return self._queue.popleft() if is_alike or is_wrong else None

    def _write_line(self, successor: Program) -> None:
        self._world.write_start(successor)
        self._do_next(lambda: self._begin(successor))

    def _begin(self, successor: Program) -> None:
        if not self.has_daemon or not self._is_open:
            self._fail(successor, RETURNED)
        elif self._world.random("process").random() < self._habits.trouble:
            self._fail(successor, NO_PROCESS)
        else:
            self._world.begin(successor)

    def _fail(self, successor: Program, word: str) -> None:
        if successor.is_supervised:
            self._world.note_end(successor, word)
            self._report(Line(successor), is_followed=False)

    # Reports

    def _report(self, line: Line, *, is_followed: bool) -> None:
        """Report at once, or within 25 ms if another program follows."""
        if not self.has_daemon:
            return
        line.program.is_unreported = True
        self._unsent.append(line)
        if not is_followed:
            self._send_all()
        elif not self._has_report_due:
            self._has_report_due = True
            self._world.after(REPORT_WITHIN_S, lambda: self._do(self._send_all))

    def _send_all(self) -> None:
        self._has_report_due = self._is_asked = False
        count, random = len(self._unsent), self._world.random("part")
        if count > 1 and random.random() < self._habits.reports_in_parts:
            count = random.randint(1, count - 1)
            count += self._unsent[count].is_start  # an end and the start after it fit into one message
            self._world.after(0.001, lambda: self._do(self._send_all))
        self.arrived += self._unsent[:count]
        del self._unsent[:count]
