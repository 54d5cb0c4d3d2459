"""The engine contract over the local engine and a cluster engine with real processes, and over the simulated engine."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.model.job import OutcomeKind
from gpuyard.ports import Ended, Engine, Launch, Prepared
from gpuyard.system.processes import boot_id
from tests.contract.cluster_engines import process_place
from tests.contract.engine import DEADLINE_S, EngineContract, Place, Programs, attempt_of, kinds, wait_until_running
from tests.simulation.behaviors import Behavior
from tests.simulation.engine import SimulatedEngine
from tests.simulation.world import World

# A daemon that is killed, before or after it started what it prepared.
_DAEMON = """
import os, signal, sys
import msgspec
from pathlib import Path
from gpuyard.model.job import OutcomeKind
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.ports import Launch
engine = LocalEngine(Path(sys.argv[1]))
launches = msgspec.json.decode(sys.argv[3], type=list[Launch])
prepared = [engine.prepare(launch, None) for launch in launches]
if sys.argv[2] == "begin":
    engine.start_prepared()
sys.stdout.write(msgspec.json.encode(prepared).decode())
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


class LocalPlace(Programs):
    places_work = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._queue = folder / "queue"
        self._engines: list[LocalEngine] = []

    def engine(self) -> LocalEngine:
        self._engines.append(LocalEngine(self._queue))
        return self._engines[-1]

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        assert isinstance(engine, LocalEngine)
        ends = engine.ended()
        deadline = time.monotonic() + DEADLINE_S
        while len(ends) < count:
            assert time.monotonic() < deadline, f"{len(ends)} of {count} ended"
            select.select([engine.fileno()] if engine.fileno() >= 0 else [], [], [], 0.2)
            ends += engine.ended()
        return ends

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        encoded = msgspec.json.encode(launches).decode()
        call = [sys.executable, "-c", _DAEMON, str(self._queue), "begin" if begun else "", encoded]
        ran = subprocess.run(call, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        assert ran.returncode == -signal.SIGKILL
        return msgspec.json.decode(ran.stdout, type=list[Prepared])

    def kill_supervisor(self, prepared: Prepared) -> None:
        os.kill(prepared.keeper_pid, signal.SIGKILL)

    def boot_id(self) -> str | None:
        return boot_id()

    def close(self) -> None:
        for engine in self._engines:
            with contextlib.suppress(OSError):  # already closed
                engine.close()


class SimulatedPlace:
    places_work = False
    error_line = None

    def __init__(self) -> None:
        behaviors = {
            "succeeds": Behavior(runs_s=0.5),
            "fails": Behavior(runs_s=0.5, exit_status="3"),
            "waits": Behavior(runs_s=1e9),
        }
        self._world = World(1, lambda words, _: behaviors[words[0]])

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
        ends = engine.ended()
        assert len(ends) == count
        return ends

    def runs(self, job_id: int) -> int:
        return sum(program.began_at is not None for program in self._world.programs if program.job_id == job_id)

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        engine = self.engine()
        prepared = [engine.prepare(launch, None) for launch in launches]
        if begun:
            engine.start_prepared()
        engine.die()
        return prepared

    def kill_supervisor(self, prepared: Prepared) -> None:
        found = next(program for program in self._world.programs if program.pid == prepared.keeper_pid)
        self._world.kill_supervisor(found, "lost")

    def boot_id(self) -> str | None:
        return f"boot-{self._world.boot}"


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        place = LocalPlace(tmp_path)
        yield place
        place.close()

    def test_an_attempt_whose_keeper_is_not_known_any_more_goes_on(self, place: Place) -> None:
        [prepared] = place.die([place.launch(1, "waits")], begun=True)
        wait_until_running(place, 1)
        engine = place.engine()
        engine.adopt([attempt_of(place, msgspec.structs.replace(prepared, keeper_pid=0))])
        assert engine.ended() == []
        place.let_go(1)
        assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.SUCCEEDED}
        assert place.runs(1) == 1


class TestSimulatedEngine(EngineContract):
    @pytest.fixture
    def place(self) -> Place:
        return SimulatedPlace()


class TestClusterEngine(EngineContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        with process_place(tmp_path) as place:
            yield place
