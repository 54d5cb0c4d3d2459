"""The engine of the crash tests: supervisors live in the world, wait to be started, and write to a journal.

It behaves as engines/local/engine.py, but does what is rare there at every chance: it clears the journal whenever that
is allowed, and a supervisor that finds its daemon gone may take its time to end. Each program has a supervisor of its
own; the supervisors of one daemon share a keeper, which starts the rest of slices (keeper.py). (The engine of `gpuyard
simulate` has no supervisors and no journal: nothing there outlives the daemon.)
"""

import signal
from collections.abc import Sequence
from itertools import chain, takewhile

from msgspec.structs import replace

from gpuyard.engines.common.program_outcome import StartContext, limit_of, outcome_of
from gpuyard.engines.common.spawn_program import is_unbegun
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.job import Attempt
from gpuyard.model.out_of_memory import Shortage
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared, SiteStatus
from tests.simulation.keeper import CALM, KeeperHabits, SimulatedKeeper
from tests.simulation.programs import Program
from tests.simulation.world import World

UNPASSABLE = "\0"
Name = tuple[int, int, int]


class SimulatedEngine(PlacesNothing):
    """Implements `ports.Engine`. `descriptors` are lease ids by descriptor; `trouble` is how often `prepare` fails."""

    def __init__(
        self,
        world: World,
        descriptors: dict[int, str],
        trouble: float = 0.0,
        habits: KeeperHabits = CALM,
    ) -> None:
        self._world = world
        self._habits = habits
        self.keeper = SimulatedKeeper(world, habits)
        self._begun: dict[Name, Program] = {}  # of slices
        self._told = 0  # how many of those were returned
        self._descriptors = descriptors
        self._trouble = trouble
        self._prepared: list[list[Program]] = []
        self._watched: dict[Name, Program] = {}
        self._over: list[Name] = []
        self._may_empty_journal = False

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        world = self._world
        if any(UNPASSABLE in argument for argument in launch.command):
            raise UserError("the command cannot be passed to a program")
        if world.random("prepare").random() < self._trouble:
            raise EnvironmentFault("the system will not make another process")
        lease_id = None if lease_descriptor is None else self._descriptors[lease_descriptor]
        passable = takewhile(lambda each: not any(UNPASSABLE in word for word in each.command), launch.rest)
        programs = [self._spawn(each, lease_id) for each in (launch, *passable)]
        self._prepared.append(programs)
        first, *rest = map(_prepared_of, programs)
        return replace(first, rest=tuple(rest))

    def _spawn(self, launch: Launch, lease_id: str | None) -> Program:
        runs_out = int(launch.environment.get("GPUYARD_OOM_COUNT", "0"))
        program = self._world.spawn(launch.job_id, launch.attempt, launch.command, lease_id, runs_out)
        program.keeper = self._living_keeper()
        self._watched[*program.name, program.pid] = program
        return program

    def _living_keeper(self) -> SimulatedKeeper:
        """Return the keeper, or a new one if it was killed."""
        if self.keeper.is_dead:
            self._receive()
            self.keeper = SimulatedKeeper(self._world, self._habits)
        return self.keeper

    def start_prepared(self) -> None:
        for programs in self._prepared:
            if programs[0].keeper is not None and not programs[0].keeper.is_dead:
                programs[0].keeper.start(programs)
        self._prepared.clear()

    def discard_prepared(self) -> None:
        for program in chain.from_iterable(self._prepared):
            del self._watched[*program.name, program.pid]
            self._world.kill_supervisor(program, "abandoned")
        self._prepared.clear()

    # The rest of slices

    def withdraw(self, attempt: Attempt) -> None:
        for name, program in self._watched.items():
            if name[:2] == (attempt.job_id, attempt.number) and program.keeper is not None:
                program.keeper.withdraw(program.name)

    def site_changes(self) -> list[SiteStatus]:
        told = list(self._begun.values())[self._told :]
        self._told = len(self._begun)
        return [
            SiteStatus(
                job_id=program.job_id,
                attempt=program.attempt,
                site_id="",
                at=self._world.clock.to_wall(program.began_at or self._world.now),
                keeper_pid=program.pid,
            )
            for program in told
        ]

    def _receive(self) -> None:
        """Read what the keeper has reported; of one that was killed, the journal."""
        for line in self.keeper.arrived:
            if line.is_start:
                self._note_begun(line.program)
            else:
                program = line.program
                program.is_unreported, program.known_at = False, self._world.now
        self.keeper.arrived.clear()
        if self.keeper.is_dead:
            self._read_journal()

    def _read_journal(self) -> None:
        for name in self._begun_in_journal():
            if name in self._watched:
                self._note_begun(self._watched[name])

    def _note_begun(self, program: Program) -> None:
        self._begun[*program.name, program.pid] = program

    def _begun_in_journal(self) -> list[Name]:
        """Return what has begun in a slice, according to the journal."""
        last = {(entry.job_id, entry.attempt, entry.pid): entry.word for entry in self._world.journal}
        in_slices = {(entry.job_id, entry.attempt, entry.pid) for entry in self._world.journal if entry.at is not None}
        return [name for name, word in last.items() if name in in_slices and not is_unbegun(word)]

    # Ends

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        for keeper in self._world.keepers:
            if keeper is not self.keeper:
                keeper.greet()
        pids = {name[:2]: name[2] for name in self._begun_in_journal()}
        for attempt in attempts:
            pid = attempt.keeper_pid or pids.get((attempt.job_id, attempt.number), 0)
            name = (attempt.job_id, attempt.number, pid)
            found = next((program for program in self._world.programs if _is_of(program, attempt, pid)), None)
            if found is not None:
                self._watched[name] = found
            else:
                self._over.append(name)
        begun = {name for name in self._begun_in_journal() if name in self._over}
        for program in self._world.programs:
            if (*program.name, program.pid) in begun:
                self._note_begun(program)
        self._read_journal()
        self._may_empty_journal = True

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        if self._may_empty_journal and not has_unrecorded and not self._watched and not self._over:
            self._world.journal.clear()
        self._receive()
        over, self._over = self._over, []
        over += [name for name, program in self._watched.items() if self._is_over(program)]
        entries = {(entry.job_id, entry.attempt, entry.pid): entry.word for entry in self._world.journal}
        for name in over:
            self._watched.pop(name, None)
        outcomes = {name: outcome_of(entries.get(name), StartContext()) for name in over}
        for (job_id, number, _), outcome in outcomes.items():
            if is_cut_off is not None and is_cut_off(job_id, number, outcome.kind):
                self._world.signal(job_id, number, signal.SIGKILL)
        return [
            Ended(
                job_id=name[0],
                attempt=name[1],
                outcome=outcome,
                shortage=self._shortage_of(name),
                limit=limit_of(entries.get(name)),
            )
            for name, outcome in outcomes.items()
        ]

    def _is_over(self, program: Program) -> bool:
        """Return whether the end is known here. What a keeper of an earlier daemon knows is in the journal."""
        is_unknown = program.is_unreported and program.keeper is self.keeper and not self.keeper.is_dead
        return not program.is_supervised and not is_unknown

    def _shortage_of(self, name: Name) -> Shortage | None:
        """Return the shortage from the program's log, which survives everything."""
        of_name = (one for one in reversed(self._world.programs) if (*one.name, one.pid) == name)
        return next((program.shortage for program in of_name), None)

    def is_readable(self) -> bool:
        """Return whether an event loop would call `ended`; stays True until it is called."""
        return bool(self.keeper.arrived) or any(self._is_over(program) for program in self._watched.values())

    def signal(self, attempt: Attempt, signum: int) -> int:
        return self._world.signal(attempt.job_id, attempt.number, signum)

    def die(self) -> None:
        """End the supervisors that wait to be started; they notice the daemon's death at once or a little later."""
        self.keeper.lose_daemon()
        for program in chain.from_iterable(self._prepared):
            random = self._world.random("gate")
            delay_s = random.choice((0.0, random.uniform(0.0, 0.5)))
            self._world.after(delay_s, lambda program=program: self._world.leave_unbegun(program))  # type: ignore[misc]


def _prepared_of(program: Program) -> Prepared:
    log = f"{program.job_id}.{program.attempt}.log"
    return Prepared(job_id=program.job_id, attempt=program.attempt, keeper_pid=program.pid, log=log)


def _is_of(program: Program, attempt: Attempt, pid: int) -> bool:
    """Return whether the program is of this attempt. The pid is not enough: another boot has the same pids."""
    return (
        program.is_supervised
        and (program.job_id, program.attempt, program.pid) == (attempt.job_id, attempt.number, pid)
        and attempt.boot_id == f"boot-{program.boot}"
    )
