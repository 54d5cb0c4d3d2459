"""What every engine promises (`ports.Engine`), held by the local one with real processes and by the simulated one."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from gpuyard.core.jobs import Attempt, OutcomeKind
from gpuyard.engines.local import LocalEngine
from gpuyard.errors import UserError
from gpuyard.leases.identity import boot_id
from gpuyard.ports import Ended, Engine, Launch, Prepared
from tests.simulation.engine import SimulatedEngine
from tests.simulation.natures import Nature
from tests.simulation.world import World

DEADLINE_S = 90.0
# What a daemon does that is killed: its supervisors are told to begin, or never are.
_DAEMON = """
import os, signal, sys
import msgspec
from pathlib import Path
from gpuyard.engines.local import LocalEngine
from gpuyard.ports import Launch
engine = LocalEngine(Path(sys.argv[1]))
launches = msgspec.json.decode(sys.argv[3], type=list[Launch])
prepared = [engine.prepare(launch, None) for launch in launches]
if sys.argv[2] == "begin":
    engine.begin()
sys.stdout.write(msgspec.json.encode(prepared).decode())
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


class Place(Protocol):
    """Where engines run: the same machine for a daemon and for the one after it."""

    def engine(self) -> Engine:
        """As a new daemon has it, the earlier one's journal included."""

    def launch(self, job_id: int, kind: str) -> Launch:
        """Of a program that `succeeds`, `fails` with 3, or `waits` until it is let go."""

    def let_go(self, job_id: int) -> None: ...

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        """The next so many that are told."""

    def runs(self, job_id: int) -> int:
        """How often its program has run."""

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        """What a daemon has prepared that was killed then."""

    def kill_supervisor(self, prepared: Prepared) -> None: ...

    def boot_id(self) -> str | None: ...


class LocalPlace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: list[LocalEngine] = []

    def engine(self) -> LocalEngine:
        self._engines.append(LocalEngine(self._folder / "queue"))
        return self._engines[-1]

    def launch(self, job_id: int, kind: str) -> Launch:
        pipe = self._folder / f"pipe{job_id}"
        if not pipe.exists():
            os.mkfifo(pipe)
        ends = {"succeeds": "exit 0", "fails": "exit 3", "waits": f"read word <{pipe}; exit 0"}
        return Launch(
            job_id=job_id,
            attempt=1,
            command=("sh", "-c", f"echo ran >>{self._folder}/runs{job_id}; {ends[kind]}"),
            cwd="/",
            environment={"PATH": os.environ["PATH"], "GPUYARD_JOB_ID": str(job_id), "GPUYARD_ATTEMPT": "1"},
        )

    def let_go(self, job_id: int) -> None:
        (self._folder / f"pipe{job_id}").write_text("go\n")

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        assert isinstance(engine, LocalEngine)
        told = engine.ended()
        deadline = time.monotonic() + DEADLINE_S
        while len(told) < count:
            assert time.monotonic() < deadline, f"{len(told)} of {count} ended"
            select.select([engine.fileno()] if engine.fileno() >= 0 else [], [], [], 0.2)
            told += engine.ended()
        return told

    def runs(self, job_id: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            return len((self._folder / f"runs{job_id}").read_text().splitlines())
        return 0

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        told = msgspec.json.encode(launches).decode()
        call = [sys.executable, "-c", _DAEMON, str(self._folder / "queue"), "begin" if begun else "", told]
        ran = subprocess.run(call, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        assert ran.returncode == -signal.SIGKILL
        return msgspec.json.decode(ran.stdout, type=list[Prepared])

    def kill_supervisor(self, prepared: Prepared) -> None:
        os.kill(prepared.pid, signal.SIGKILL)

    def boot_id(self) -> str | None:
        return boot_id()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


class SimulatedPlace:
    def __init__(self) -> None:
        natures = {"succeeds": Nature(runs_s=0.5), "fails": Nature(runs_s=0.5, word="3"), "waits": Nature(runs_s=1e9)}
        self._world = World(1, lambda words, _: natures[words[0]])

    def engine(self) -> SimulatedEngine:
        return SimulatedEngine(self._world, {})

    def launch(self, job_id: int, kind: str) -> Launch:
        return Launch(job_id=job_id, attempt=1, command=(kind,), cwd="/", environment={})

    def let_go(self, job_id: int) -> None:
        for program in self._world.programs:
            if program.job_id == job_id and program.is_running:
                self._world.exit(program, "0")

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        self._world.advance(self._world.now + 1.0)
        told = engine.ended()
        assert len(told) == count
        return told

    def runs(self, job_id: int) -> int:
        return sum(program.began_at is not None for program in self._world.programs if program.job_id == job_id)

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        engine = self.engine()
        prepared = [engine.prepare(launch, None) for launch in launches]
        if begun:
            engine.begin()
        engine.die()
        return prepared

    def kill_supervisor(self, prepared: Prepared) -> None:
        found = next(program for program in self._world.programs if program.pid == prepared.pid)
        self._world.kill_supervisor(found, "lost")

    def boot_id(self) -> str | None:
        return f"boot-{self._world.boot}"


@pytest.fixture(params=["local", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "simulated":
        yield SimulatedPlace()
        return
    local = LocalPlace(tmp_path)
    yield local
    local.close()


def attempt_of(place: Place, prepared: Prepared) -> Attempt:
    return Attempt(
        job_id=prepared.job_id,
        number=prepared.attempt,
        pid=prepared.pid,
        boot_id=place.boot_id(),
        started_at=0.0,
    )


def kinds(told: Sequence[Ended]) -> dict[int, OutcomeKind]:
    return {one.job_id: one.outcome.kind for one in told}


def wait_until_it_runs(place: Place, job_id: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not place.runs(job_id):
        assert time.monotonic() < deadline, f"job {job_id} does not run"
        select.select([], [], [], 0.005)


def test_what_was_prepared_runs_when_it_is_let_to_and_its_end_is_told_once(place: Place) -> None:
    engine = place.engine()
    for job_id, kind in ((1, "succeeds"), (2, "fails")):
        prepared = engine.prepare(place.launch(job_id, kind), None)
        assert (prepared.job_id, prepared.attempt) == (job_id, 1)
    assert place.runs(1) == place.runs(2) == 0
    engine.begin()
    told = place.ended(engine, 2)
    assert {one.job_id: (one.attempt, one.outcome.kind, one.outcome.status) for one in told} == {
        1: (1, OutcomeKind.SUCCEEDED, 0),
        2: (1, OutcomeKind.FAILED, 3),
    }
    assert place.runs(1) == place.runs(2) == 1
    assert engine.ended() == []


def test_what_was_abandoned_never_runs_and_is_not_told_of(place: Place) -> None:
    engine = place.engine()
    engine.prepare(place.launch(1, "succeeds"), None)
    engine.abandon()
    engine.prepare(place.launch(2, "succeeds"), None)
    engine.begin()
    assert kinds(place.ended(engine, 1)) == {2: OutcomeKind.SUCCEEDED}
    assert place.runs(1) == 0


def test_an_abandoned_attempt_may_be_prepared_again_under_its_number(place: Place) -> None:
    engine = place.engine()
    engine.prepare(place.launch(1, "fails"), None)
    engine.abandon()
    engine.prepare(place.launch(1, "succeeds"), None)
    engine.begin()
    assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.SUCCEEDED}
    assert place.runs(1) == 1


def test_whoever_dies_before_the_word_leaves_what_never_ran(place: Place) -> None:
    prepared = place.die([place.launch(1, "succeeds"), place.launch(2, "succeeds")], begun=False)
    engine = place.engine()
    engine.adopt([attempt_of(place, one) for one in prepared])
    assert kinds(place.ended(engine, 2)) == {1: OutcomeKind.UNBEGUN, 2: OutcomeKind.UNBEGUN}
    assert place.runs(1) == place.runs(2) == 0


def test_an_attempt_that_never_began_may_be_made_again_under_its_number(place: Place) -> None:
    place.die([place.launch(1, "fails")], begun=False)
    engine = place.engine()
    engine.adopt([])
    engine.prepare(place.launch(1, "succeeds"), None)
    engine.begin()
    assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.SUCCEEDED}


def test_what_runs_outlives_its_daemon_and_the_next_one_hears_of_its_end(place: Place) -> None:
    prepared = place.die([place.launch(1, "waits")], begun=True)
    engine = place.engine()
    engine.adopt([attempt_of(place, one) for one in prepared])
    assert engine.ended() == []
    place.let_go(1)
    assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.SUCCEEDED}
    assert place.runs(1) == 1


def test_what_was_told_and_not_recorded_is_told_again_to_the_next_daemon(place: Place) -> None:
    first = place.engine()
    prepared = first.prepare(place.launch(1, "fails"), None)
    first.begin()
    told = place.ended(first, 1)
    second = place.engine()
    second.adopt([attempt_of(place, prepared)])
    again = place.ended(second, 1)
    assert [(one.outcome.kind, one.outcome.status) for one in again] == [(OutcomeKind.FAILED, 3)]
    assert kinds(again) == kinds(told)


def test_one_whose_supervisor_was_killed_is_lost(place: Place) -> None:
    engine = place.engine()
    prepared = engine.prepare(place.launch(1, "waits"), None)
    engine.begin()
    wait_until_it_runs(place, 1)
    place.kill_supervisor(prepared)
    assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.LOST}
    engine.signal(attempt_of(place, prepared), signal.SIGKILL)


def test_one_that_nobody_has_seen_never_began(place: Place) -> None:
    engine = place.engine()
    other = engine.prepare(place.launch(2, "waits"), None)
    engine.begin()
    wait_until_it_runs(place, 2)
    stranger = attempt_of(place, msgspec.structs.replace(other, job_id=1))
    successor = place.engine()
    successor.adopt([stranger])
    assert kinds(place.ended(successor, 1)) == {1: OutcomeKind.UNBEGUN}
    engine.signal(attempt_of(place, other), signal.SIGKILL)
    assert kinds(place.ended(engine, 1)) == {2: OutcomeKind.FAILED}


def test_a_signal_reaches_the_program_and_its_supervisor_tells_of_it(place: Place) -> None:
    engine = place.engine()
    prepared = engine.prepare(place.launch(1, "waits"), None)
    engine.begin()
    attempt = attempt_of(place, prepared)
    wait_until_it_runs(place, 1)
    assert engine.signal(attempt, signal.SIGTERM) >= 1
    [told] = place.ended(engine, 1)
    assert (told.outcome.kind, told.outcome.status) == (OutcomeKind.FAILED, 128 + signal.SIGTERM)
    assert engine.signal(attempt, signal.SIGTERM) == 0


def test_a_command_that_no_program_can_be_given_is_the_user_s_mistake(place: Place) -> None:
    engine = place.engine()
    launch = place.launch(1, "succeeds")
    with pytest.raises(UserError):
        engine.prepare(msgspec.structs.replace(launch, command=(*launch.command, "\0")), None)
    engine.prepare(place.launch(2, "succeeds"), None)
    engine.begin()
    assert kinds(place.ended(engine, 1)) == {2: OutcomeKind.SUCCEEDED}
