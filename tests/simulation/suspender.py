"""The suspender of the crash tests: helper processes move a program's memory to RAM and back.

A helper that was started goes on when the daemon dies, and its result is lost; the program's state is the truth. Two
helpers of one program work one after the other. A repeated request that is already done succeeds. Restoring memory that
does not fit ruins the program for good, and sometimes a driver does that by itself.
"""

from collections.abc import Callable, Mapping

from gpuyard.model.job import Attempt
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.ports import SuspendResult
from tests.simulation.programs import Program
from tests.simulation.world import World

Report = Callable[..., None]


class SimulatedSuspender:
    """Implements `ports.Suspender` for one daemon. `trouble` is how often a move fails."""

    def __init__(self, world: World, trouble: float = 0.0) -> None:
        self._world = world
        self._trouble = trouble
        self._news: list[SuspendResult] = []

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        unseen = [device_id for device_id in attempt.devices if snapshot.device(device_id) is None]
        return f"{unseen[0]} is not visible now" if unseen else None

    def suspend(self, attempt: Attempt) -> None:
        self._order(attempt, _Suspension, is_resumed=False)

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        def resumption(world: World, program: Program, trouble: float, report: Report) -> "_Move":
            return _Resumption(world, program, trouble, report, needs_mb)

        self._order(attempt, resumption, is_resumed=True)

    def can_park(self, attempt: Attempt) -> bool:
        return False

    def moved(self) -> list[SuspendResult]:
        news, self._news = self._news, []
        return news

    def is_readable(self) -> bool:
        return bool(self._news)

    def is_at_work_on(self, attempt: Attempt) -> bool:
        """Return whether a helper works on the attempt, or a result waits to be read."""
        program = self._find(attempt)
        has_result = any((news.job_id, news.attempt) == (attempt.job_id, attempt.number) for news in self._news)
        return has_result or (program is not None and bool(program.orders))

    def _order(
        self, attempt: Attempt, kind: "Callable[[World, Program, float, Report], _Move]", *, is_resumed: bool
    ) -> None:
        def report(*, is_done: bool, is_ruined: bool = False, text: str = "") -> None:
            self._news.append(
                SuspendResult(
                    job_id=attempt.job_id,
                    attempt=attempt.number,
                    is_resumed=is_resumed,
                    is_done=is_done,
                    is_ruined=is_ruined,
                    text=text,
                )
            )

        program = self._find(attempt)
        if program is None:
            report(is_done=False, text="it has no processes")
            return
        program.orders.append(kind(self._world, program, self._trouble, report).begin)
        if len(program.orders) == 1:
            program.orders[0]()

    def _find(self, attempt: Attempt) -> Program | None:
        running = (program for program in self._world.programs if program.is_running)
        return next((one for one in running if one.name == (attempt.job_id, attempt.number)), None)


class _Move:
    """One helper. When it ends, successfully or not, the next helper of the program starts."""

    def __init__(self, world: World, program: Program, trouble: float, report: Report) -> None:
        self._world = world
        self._program = program
        self._report = report
        self._random = world.random("move")
        self._trouble = trouble
        self._fails = self._random.random() < trouble

    def begin(self) -> None:
        self._later(self._work)

    def _work(self) -> None:
        raise NotImplementedError

    def _later(self, act: Callable[[], None]) -> None:
        def if_running() -> None:
            if self._program.is_running:
                act()
            else:
                self._end(is_done=False, text="it has just ended")

        self._world.after(self._random.choice((0.0, self._random.uniform(0.0, 2.0))), if_running)

    def _end(self, *, is_done: bool, is_ruined: bool = False, text: str = "") -> None:
        self._world.record("moved", (self._program.name, type(self).__name__.strip("_"), is_done, is_ruined))
        self._report(is_done=is_done, is_ruined=is_ruined, text=text)
        self._program.orders.pop(0)
        if self._program.orders:
            self._program.orders[0]()


class _Suspension(_Move):
    def _work(self) -> None:
        """Freeze the program, which runs until then, and move its memory later."""
        if self._program.is_ruined:
            self._end(is_done=False, is_ruined=True, text="it has failed in the driver")
        elif self._program.stash_mb is not None:
            self._end(is_done=True)
        else:
            self._program.freeze(self._world.now)
            self._later(self._take_away)

    def _take_away(self) -> None:
        program = self._program
        if self._fails:
            self._world.thaw(program)
            self._end(is_done=False, text="the driver refuses")
            return
        program.stash_mb, program.memory_mb = program.memory_mb, {}
        if program.behavior.ends_suspended:
            rest_s = max(0.0, program.behavior.runs_s - program.ran_s)
            self._world.after(self._random.choice((0.0, rest_s, 0.3)), self._end_suspended)
        self._end(is_done=True)

    def _end_suspended(self) -> None:
        if self._program.stash_mb is not None and self._program.is_running:
            self._world.exit(self._program, self._program.behavior.exit_status)


class _Resumption(_Move):
    def __init__(
        self, world: World, program: Program, trouble: float, report: Report, needs_mb: Mapping[str, float]
    ) -> None:
        super().__init__(world, program, trouble, report)
        self._needs_mb = needs_mb

    def _work(self) -> None:
        program, world = self._program, self._world
        if program.is_ruined:
            self._end(is_done=False, is_ruined=True, text="it has failed in the driver")
        elif program.stash_mb is None:
            world.thaw(program)
            self._end(is_done=True)
        elif self._fails or any(world.free_mb(device_id) < need for device_id, need in self._needs_mb.items()):
            self._end(is_done=False, text="too little free memory")
        else:
            self._put_back(program.stash_mb)

    def _put_back(self, stash_mb: dict[str, float]) -> None:
        program, world = self._program, self._world
        is_too_full = any(world.free_mb(device_id) < held for device_id, held in stash_mb.items())
        if is_too_full or self._random.random() < self._trouble / 4:
            world.record("ruined", program.name)
            program.is_ruined = True
            self._end(is_done=False, is_ruined=True, text="it could not be put back")
            return
        program.memory_mb, program.stash_mb = stash_mb, None
        world.thaw(program)
        self._end(is_done=True)
