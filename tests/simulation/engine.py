"""The engine of the crash tests: supervisors live in the world, wait to be started, and write to a journal.

It behaves as engines/local/engine.py, but does what is rare there at every chance: it clears the journal whenever that
is allowed, and a supervisor that finds its daemon gone may take its time to end. (The engine of `gpuyard simulate` has
no supervisors and no journal: nothing there outlives the daemon.)
"""

import signal
from collections.abc import Sequence

from gpuyard.core.job.job import Attempt
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.engines.common.places_nothing import PlacesNothing
from gpuyard.engines.common.program_outcome import StartContext, outcome_of
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Ended, IsCutOff, Launch, Prepared
from tests.simulation.programs import Program
from tests.simulation.world import World

UNPASSABLE = "\0"
Name = tuple[int, int, int]


class SimulatedEngine(PlacesNothing):
    """Implements `ports.Engine`. `descriptors` are lease ids by descriptor; `trouble` is how often `prepare` fails."""

    def __init__(self, world: World, descriptors: dict[int, str], trouble: float = 0.0) -> None:
        self._world = world
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
        self._prepared.append(program)
        self._watched[*program.name, program.pid] = program
        return Prepared(
            job_id=launch.job_id,
            attempt=launch.attempt,
            keeper_pid=program.pid,
            log=f"{launch.job_id}.{launch.attempt}.log",
        )

    def start_prepared(self) -> None:
        for program in self._prepared:
            self._world.begin(program)
        self._prepared.clear()

    def discard_prepared(self) -> None:
        for program in self._prepared:
            del self._watched[*program.name, program.pid]
            self._world.kill_supervisor(program, "abandoned")
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            name = (attempt.job_id, attempt.number, attempt.keeper_pid)
            found = next((program for program in self._world.programs if _is_of(program, attempt)), None)
            if found is not None:
                self._watched[name] = found
            else:
                self._over.append(name)
        self._may_empty_journal = True

    def ended(self, is_cut_off: IsCutOff | None = None) -> list[Ended]:
        if self._may_empty_journal and not self._watched and not self._over:
            self._world.journal.clear()
        over, self._over = self._over, []
        over += [name for name, program in self._watched.items() if not program.is_supervised]
        entries = {(job_id, attempt, pid): entry for job_id, attempt, pid, entry in self._world.journal}
        for name in over:
            self._watched.pop(name, None)
        outcomes = {name: outcome_of(entries.get(name), StartContext()) for name in over}
        for (job_id, number, _), outcome in outcomes.items():
            if is_cut_off is not None and is_cut_off(job_id, number, outcome.kind):
                self._world.signal(job_id, number, signal.SIGKILL)
        return [
            Ended(job_id=name[0], attempt=name[1], outcome=outcome, shortage=self._shortage_of(name))
            for name, outcome in outcomes.items()
        ]

    def _shortage_of(self, name: Name) -> Shortage | None:
        """Return the shortage from the program's log, which survives everything."""
        of_name = (one for one in reversed(self._world.programs) if (*one.name, one.pid) == name)
        return next((program.shortage for program in of_name), None)

    def is_readable(self) -> bool:
        """Return whether an event loop would call `ended`; stays True until it is called."""
        return any(not program.is_supervised for program in self._watched.values())

    def signal(self, attempt: Attempt, signum: int) -> int:
        return self._world.signal(attempt.job_id, attempt.number, signum)

    def die(self) -> None:
        """End the supervisors that wait to be started; they notice the daemon's death at once or a little later."""
        for program in self._prepared:
            random = self._world.random("gate")
            delay_s = random.choice((0.0, random.uniform(0.0, 0.5)))
            self._world.after(delay_s, lambda program=program: self._world.leave_unbegun(program))  # type: ignore[misc]


def _is_of(program: Program, attempt: Attempt) -> bool:
    """Return whether the program is of this attempt. The pid is not enough: another boot has the same pids."""
    return (
        program.is_supervised
        and (program.job_id, program.attempt, program.pid) == (attempt.job_id, attempt.number, attempt.keeper_pid)
        and attempt.boot_id == f"boot-{program.boot}"
    )
