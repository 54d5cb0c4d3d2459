"""The engine of the crash tests: supervisors live in the world, wait to be started, and write to a journal.

It behaves as engines/local/engine.py, but does what is rare there at every chance: it clears the journal whenever that
is allowed, and a supervisor that finds its daemon gone may take its time to end. Each program has a supervisor of its
own; the supervisors of one daemon share a keeper with its prefetch queue (keeper.py). (The engine of `gpuyard simulate`
has no supervisors and no journal: nothing there outlives the daemon.)
"""

import signal
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gpuyard.core.job.job import Attempt
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.engines.common.places_nothing import PlacesNothing
from gpuyard.engines.common.program_outcome import StartContext, limit_of, outcome_of
from gpuyard.engines.common.unbegun_words import is_unbegun
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Ended, Followed, IsCutOff, Launch, Prepared
from tests.simulation.keeper import CALM, KeeperHabits, SimulatedKeeper
from tests.simulation.programs import Program
from tests.simulation.world import JournalEntry, World

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
        self._put: dict[tuple[int, int], Launch] = {}
        self._followed: list[tuple[Followed, Program]] = []
        self._descriptors = descriptors
        self._trouble = trouble
        self._prepared: list[Program] = []
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
        runs_out = int(launch.environment.get("GPUYARD_OOM_COUNT", "0"))
        program = world.spawn(launch.job_id, launch.attempt, launch.command, lease_id, runs_out)
        program.keeper, program.group = self._living_keeper(), launch.group
        self._prepared.append(program)
        self._watched[*program.name, program.pid] = program
        return Prepared(
            job_id=launch.job_id,
            attempt=launch.attempt,
            keeper_pid=program.pid,
            log=_log_of(program.name),
        )

    def _living_keeper(self) -> SimulatedKeeper:
        """Return the keeper, or a new one if it was killed."""
        if self.keeper.is_dead:
            self._receive()
            self.keeper = SimulatedKeeper(self._world, self._habits)
        return self.keeper

    def start_prepared(self) -> None:
        for program in self._prepared:
            self._world.begin(program)
        self._prepared.clear()

    def discard_prepared(self) -> None:
        for program in self._prepared:
            del self._watched[*program.name, program.pid]
            self._world.kill_supervisor(program, "abandoned")
        self._prepared.clear()

    # Prefetched attempts

    def put(self, launch: Launch) -> bool:
        if any(UNPASSABLE in argument for argument in launch.command):
            raise UserError("the command cannot be passed to a program")
        has_log = self._world.random("put").random() >= self._trouble
        is_put = has_log and not self.keeper.is_dead and self.keeper.put(launch)
        if is_put:
            self._put[launch.job_id, launch.attempt] = launch
        return is_put

    def prefetched(self) -> AbstractSet[int]:
        return {job_id for job_id, _ in self._put} | {each.job_id for each, _ in self._followed}

    def taken(self) -> set[int]:
        """Return the jobs that the keeper has taken, and of which this engine has not been told."""
        return {job_id for job_id, _ in self._put} - self.keeper.prefetched()

    def take_back(self, most: int | None = None) -> None:
        for launch in self.keeper.take_back(most):
            del self._put[launch.job_id, launch.attempt]
        if most is None and self._put:
            self.keeper.ask_to_report()

    def followed(self) -> list[Followed]:
        taken, self._followed = self._followed, []
        for _, program in taken:
            program.is_told = True
        return [each for each, _ in taken]

    def followed_before(self) -> list[Followed]:
        last = {(entry.job_id, entry.attempt, entry.pid): entry.word for entry in self._world.journal}
        return [
            self._followed_of(entry)
            for entry in self._world.journal
            if entry.after is not None and not is_unbegun(last[entry.job_id, entry.attempt, entry.pid])
        ]

    def _followed_of(self, entry: JournalEntry) -> Followed:
        assert entry.after is not None
        at, name = self._world.clock.to_wall(entry.at), (entry.job_id, entry.attempt)
        log = _log_of(name)
        return Followed(
            job_id=name[0], attempt=name[1], after=entry.after, at=at, keeper_pid=entry.pid, log=log
        )  # fmt: skip

    def _receive(self) -> None:
        """Read what the keeper has reported; of one that was killed, the journal."""
        for line in self.keeper.arrived:
            if line.is_start:
                self._note_start(line.program)
            else:
                program = line.program
                program.is_unreported, program.known_at = False, self._world.now
        self.keeper.arrived.clear()
        if self.keeper.is_dead:
            written = {(entry.job_id, entry.attempt, entry.pid) for entry in self._world.journal if entry.after}
            for program in self._world.programs:
                if program.keeper is self.keeper and (*program.name, program.pid) in written:
                    self._note_start(program)
            self._put.clear()

    def _note_start(self, program: Program) -> None:
        launch, after = self._put.pop(program.name, None), program.after
        if launch is not None and after is not None:
            self._watched[*program.name, program.pid] = program
            entry = JournalEntry(*program.name, program.pid, "", after.name, program.born_at)
            self._followed.append((self._followed_of(entry), program))

    # Ends

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        for keeper in self._world.keepers:
            if keeper is not self.keeper:
                keeper.greet()
        for attempt in attempts:
            name = (attempt.job_id, attempt.number, attempt.keeper_pid)
            found = next((program for program in self._world.programs if _is_of(program, attempt)), None)
            if found is not None:
                self._watched[name] = found
            else:
                self._over.append(name)
        self._may_empty_journal = True

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        if self._may_empty_journal and not has_unrecorded and not self._watched and not self._over and not self._put:
            self._world.journal.clear()
        self._receive()
        over, self._over = self._over, []
        over += self._ends()
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

    def _ends(self) -> list[Name]:
        """Return what is over: all, or half of what others could follow, if nothing has followed."""
        over = [name for name, program in self._watched.items() if self._is_over(program)]
        if self._followed:
            return over
        in_groups = [name for name in over if self._watched[name].group]
        return [name for name in over if name not in in_groups[max(1, len(in_groups) // 2) :]]

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
        has_news = bool(self.keeper.arrived) or (self.keeper.is_dead and bool(self._put))
        return has_news or any(self._is_over(program) for program in self._watched.values())

    def signal(self, attempt: Attempt, signum: int) -> int:
        return self._world.signal(attempt.job_id, attempt.number, signum)

    def die(self) -> None:
        """End the supervisors that wait to be started; they notice the daemon's death at once or a little later."""
        self.keeper.lose_daemon()
        for program in self._prepared:
            random = self._world.random("gate")
            delay_s = random.choice((0.0, random.uniform(0.0, 0.5)))
            self._world.after(delay_s, lambda program=program: self._world.leave_unbegun(program))  # type: ignore[misc]


def _log_of(name: tuple[int, int]) -> str:
    return f"{name[0]}.{name[1]}.log"


def _is_of(program: Program, attempt: Attempt) -> bool:
    """Return whether the program is of this attempt. The pid is not enough: another boot has the same pids."""
    return (
        program.is_supervised
        and (program.job_id, program.attempt, program.pid) == (attempt.job_id, attempt.number, attempt.keeper_pid)
        and attempt.boot_id == f"boot-{program.boot}"
    )
