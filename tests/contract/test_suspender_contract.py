"""The contract of a suspender (`ports.Suspender`), over the local suspender with real processes on simulated devices,
and over the simulated suspender."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, Started
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.ports import Launch, Suspender, SuspendResult
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from gpuyard.system.processes import boot_id
from tests.simulation.behaviors import Behavior
from tests.simulation.suspender import SimulatedSuspender
from tests.simulation.world import World

DEADLINE_S = 90.0
HELD_MB, CARD_MB = 8192.0, 24_576.0


class LocalPlace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "queue"
        self._engine = LocalEngine(self._folder)
        self._devices = SimulatedDevices()
        self._suspenders: list[LocalSuspender] = []
        self._attempts: list[Attempt] = []
        self._other: SimulatedUse | None = None

    def attempt(self) -> Attempt:
        ours = {name: value for name, value in os.environ.items() if name.startswith("GPUYARD_")}
        environment = {**ours, "GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1"}
        command = (sys.executable, "-m", "gpuyard", "sim-job", "--vram", "8G", "--seconds", "600")
        launch = Launch(job_id=1, attempt=1, command=command, cwd="/", environment=environment)
        prepared = self._engine.prepare(launch, None)
        self._engine.start_prepared()
        self._attempts.append(
            Attempt(
                job_id=1,
                number=1,
                phase=Started(at=time.time(), keeper_pid=prepared.keeper_pid),
                boot_id=boot_id(),
                devices=("SIM-0",),
            )
        )
        _wait(lambda: self.used_mb() == HELD_MB)
        return self._attempts[-1]

    def suspender(self) -> LocalSuspender:
        self._suspenders.append(LocalSuspender(self._folder / "suspending", str(self._folder)))
        return self._suspenders[-1]

    def next_result(self, suspender: Suspender) -> SuspendResult:
        assert isinstance(suspender, LocalSuspender)
        deadline = time.monotonic() + DEADLINE_S
        while not (results := suspender.moved()):
            assert time.monotonic() < deadline, "no result"
            select.select([suspender.fileno()] if suspender.fileno() >= 0 else [], [], [], 0.5)
        return results[0]

    def used_mb(self) -> float:
        return self._devices.read(1).devices[0].memory_used_mb or 0.0

    def fill(self, megabytes: float) -> None:
        if self._other is not None:
            self._other.close()
        self._other = SimulatedUse()
        self._other.allocate("SIM-0", megabytes)

    def kill(self, attempt: Attempt) -> None:
        self._engine.signal(attempt, signal.SIGKILL)
        _wait(lambda: self.used_mb() == 0.0)

    def snapshot(self) -> Snapshot:
        return Snapshot(taken_at=time.time(), host=Host(), devices=self._devices.read(1).devices)

    def close(self) -> None:
        for attempt in self._attempts:
            process_tree.signal_each([attempt], str(self._folder), signal.SIGKILL)
        for suspender in self._suspenders:
            suspender.close()
        if self._other is not None:
            self._other.close()
        self._engine.close()


class SimulatedPlace:
    def __init__(self) -> None:
        self._world = World(1, lambda *_: Behavior(runs_s=1e9, climbs=((0.0, HELD_MB),)), devices=1)

    def attempt(self) -> Attempt:
        program = self._world.spawn(1, 1, ("program",), None)
        program.devices = self._world.device_ids
        self._world.begin(program)
        self._world.advance(self._world.now + 1.0)
        return Attempt(
            job_id=1,
            number=1,
            phase=Started(at=self._world.now, keeper_pid=program.pid),
            boot_id="boot-1",
            devices=program.devices,
        )

    def suspender(self) -> SimulatedSuspender:
        return SimulatedSuspender(self._world)

    def next_result(self, suspender: Suspender) -> SuspendResult:
        until = self._world.now + DEADLINE_S
        while not (results := suspender.moved()):
            assert self._world.now < until, "no result"
            self._world.advance(self._world.now + 0.1)
        return results[0]

    def used_mb(self) -> float:
        return CARD_MB - self._world.free_mb(self._world.device_ids[0])

    def fill(self, megabytes: float) -> None:
        self._world.set_foreign_memory(self._world.device_ids[0], megabytes)

    def kill(self, attempt: Attempt) -> None:
        self._world.signal(attempt.job_id, attempt.number, signal.SIGKILL)

    def snapshot(self) -> Snapshot:
        return self._world.snapshot()


Place = LocalPlace | SimulatedPlace  # Of one device of 24 GB, and an attempt that holds 8 GB of it.


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        select.select([], [], [], 0.01)


@pytest.fixture(params=["local", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "simulated":
        yield SimulatedPlace()
        return
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    local = LocalPlace(tmp_path)
    with contextlib.closing(local):
        yield local


def needs(attempt: Attempt) -> dict[str, float]:
    return dict.fromkeys(attempt.devices, HELD_MB)


def test_memory_leaves_the_device_and_comes_back_however_often_it_is_asked(place: Place) -> None:
    attempt, suspender = place.attempt(), place.suspender()
    assert suspender.refusal(attempt, place.snapshot()) is None
    assert suspender.moved() == []
    suspender.suspend(attempt)
    moved = place.next_result(suspender)
    assert (moved.job_id, moved.attempt, moved.is_resumed, moved.is_done) == (1, 1, False, True)
    assert place.used_mb() == 0.0
    suspender.resume(attempt, needs(attempt))
    moved = place.next_result(suspender)
    assert (moved.is_resumed, moved.is_done, moved.is_ruined) == (True, True, False)
    assert place.used_mb() == HELD_MB
    assert suspender.moved() == [], "memory leaves the device and comes back"
    # Repeated suspend and resume requests succeed.
    for _ in range(2):
        suspender.suspend(attempt)
        assert place.next_result(suspender).is_done
        assert place.used_mb() == 0.0
    for _ in range(2):
        suspender.resume(attempt, needs(attempt))
        assert place.next_result(suspender).is_done
        assert place.used_mb() == HELD_MB
    first, second = suspender, place.suspender()
    first.suspend(attempt)
    second.suspend(attempt)
    assert place.next_result(second).is_done
    assert place.used_mb() == 0.0
    second.resume(attempt, needs(attempt))
    assert place.next_result(second).is_done
    assert place.used_mb() == HELD_MB, "the next daemon finds a requested suspend done"


def test_a_resume_without_free_memory_changes_nothing_and_may_be_repeated(place: Place) -> None:
    attempt, suspender = place.attempt(), place.suspender()
    suspender.suspend(attempt)
    place.next_result(suspender)
    place.fill(CARD_MB - 1024.0)
    suspender.resume(attempt, needs(attempt))
    moved = place.next_result(suspender)
    assert (moved.is_resumed, moved.is_done, moved.is_ruined) == (True, False, False)
    assert moved.text
    place.fill(1024.0)
    suspender.resume(attempt, needs(attempt))
    assert place.next_result(suspender).is_done


def test_a_resume_forced_without_free_memory_ruins_the_attempt(place: Place) -> None:
    attempt, suspender = place.attempt(), place.suspender()
    suspender.suspend(attempt)
    place.next_result(suspender)
    place.fill(CARD_MB - 1024.0)
    suspender.resume(attempt, {})
    assert place.next_result(suspender).is_ruined
    place.fill(0.0)
    suspender.resume(attempt, needs(attempt))
    assert place.next_result(suspender).is_ruined, "even when there is enough free memory again"


def test_an_attempt_that_has_ended_or_is_unseen_is_refused(place: Place) -> None:
    attempt, suspender = place.attempt(), place.suspender()
    unseen = Snapshot(taken_at=None, host=Host())
    assert suspender.refusal(attempt, unseen) is not None, "an attempt on an unseen device is refused"
    place.kill(attempt)
    suspender.suspend(attempt)
    moved = place.next_result(suspender)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert moved.text, "suspending an attempt that has ended fails"
