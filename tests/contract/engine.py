"""The contract of every engine (`ports.Engine`), as tests that run over any `Place`.

To test an engine, write a Place for it, and a test class with a fixture `place`:

    class TestMine(EngineContract):
        @pytest.fixture
        def place(self, tmp_path: Path) -> Iterator[Place]: ...
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from gpuyard.errors import UserError
from gpuyard.model.job import Attempt, OutcomeKind, Started
from gpuyard.ports import Ended, Engine, Launch, Prepared, SiteStatus

DEADLINE_S = 90.0


class Place(Protocol):
    """Where engines run: the same machine for a daemon and for the one after it."""

    @property
    def places_work(self) -> bool:
        """Whether the engine itself decides where and when attempts run."""

    @property
    def error_line(self) -> str | None:
        """What a program that `fails` writes before it does; None where programs have no log."""

    def engine(self) -> Engine:
        """Return the engine of a new daemon, on the files that the earlier one left."""

    def launch(self, job_id: int, kind: str) -> Launch:
        """Return the launch of a program that `succeeds`, `fails` with status 3, or `waits` for `let_go`."""

    def let_go(self, job_id: int) -> None: ...

    def ended(self, engine: Engine, count: int) -> list[Ended]:
        """Wait for the next `count` ends and return them."""

    def runs(self, job_id: int) -> int:
        """Return how often its program has run."""

    def die(self, launches: Sequence[Launch], *, begun: bool) -> list[Prepared]:
        """Run a daemon that prepares `launches`, starts them if `begun`, and is killed. Return what it prepared."""

    def kill_supervisor(self, prepared: Prepared) -> None:
        """Kill the parent of the program."""

    def boot_id(self) -> str | None: ...


class Programs:
    """Real programs for a Place: they write a line for each run, and wait at a pipe for `let_go`."""

    error_line = "ValueError: loss is NaN"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def launch(self, job_id: int, kind: str) -> Launch:
        pipe = self._folder / f"pipe{job_id}"
        if not pipe.exists():
            os.mkfifo(pipe)
        ends = {
            "succeeds": "exit 0",
            "fails": f"echo '{self.error_line}' >&2; exit 3",
            "waits": f"read word <{pipe}; exit 0",
        }
        return Launch(
            job_id=job_id,
            attempt=1,
            command=("sh", "-c", f"echo ran >>{self._folder}/runs{job_id}; {ends[kind]}"),
            cwd="/",
            environment={"PATH": os.environ["PATH"], "GPUYARD_JOB_ID": str(job_id), "GPUYARD_ATTEMPT": "1"},
        )

    def let_go(self, job_id: int) -> None:
        (self._folder / f"pipe{job_id}").write_text("go\n")

    def runs(self, job_id: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            return len((self._folder / f"runs{job_id}").read_text().splitlines())
        return 0


def until(condition: Callable[[], object], what: str, every_s: float = 0.02) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], every_s)


def attempt_of(place: Place, prepared: Prepared) -> Attempt:
    return Attempt(
        job_id=prepared.job_id, number=prepared.attempt, phase=Started(at=0.0, keeper_pid=prepared.keeper_pid),
        boot_id=place.boot_id(), log=prepared.log,
    )  # fmt: skip


def kinds(ends: Sequence[Ended]) -> dict[int, OutcomeKind]:
    return {one.job_id: one.outcome.kind for one in ends}


def ended_by_signal(place: Place) -> set[OutcomeKind]:
    """Return the outcomes of an attempt ended by a signal: a site that places work may report a cancellation."""
    return {OutcomeKind.FAILED, OutcomeKind.CANCELLED} if place.places_work else {OutcomeKind.FAILED}


def wait_until_running(place: Place, job_id: int) -> None:
    until(lambda: place.runs(job_id), f"job {job_id} runs")


class EngineContract:
    """The tests; a subclass defines the fixture `place`."""

    def test_a_prepared_attempt_runs_when_started_and_its_end_is_reported_once(self, place: Place) -> None:
        engine = place.engine()
        for job_id, kind in ((1, "succeeds"), (2, "fails")):
            prepared = engine.prepare(place.launch(job_id, kind), None)
            assert (prepared.job_id, prepared.attempt) == (job_id, 1)
        assert place.runs(1) == place.runs(2) == 0
        engine.start_prepared()
        ends = place.ended(engine, 2)
        assert {one.job_id: (one.attempt, one.outcome.kind, one.outcome.status) for one in ends} == {
            1: (1, OutcomeKind.SUCCEEDED, 0),
            2: (1, OutcomeKind.FAILED, 3),
        }
        assert place.runs(1) == place.runs(2) == 1
        assert {one.job_id: one.outcome.error_line for one in ends} == {1: None, 2: place.error_line}
        assert engine.ended() == []

    def test_a_discarded_attempt_never_runs_and_may_be_prepared_again(self, place: Place) -> None:
        engine = place.engine()
        until(lambda: engine.offer().trouble is None, "an offer without trouble")
        most = engine.offer().most_jobs
        assert most is None or most > 0
        engine.prepare(place.launch(1, "succeeds"), None)
        engine.prepare(place.launch(3, "fails"), None)
        engine.discard_prepared()
        engine.prepare(place.launch(2, "succeeds"), None)
        engine.prepare(place.launch(3, "succeeds"), None)
        engine.start_prepared()
        assert kinds(place.ended(engine, 2)) == {2: OutcomeKind.SUCCEEDED, 3: OutcomeKind.SUCCEEDED}
        assert (place.runs(1), place.runs(3)) == (0, 1)

    def test_attempts_of_a_daemon_killed_before_starting_them_never_ran(self, place: Place) -> None:
        prepared = place.die([place.launch(1, "succeeds"), place.launch(2, "succeeds")], begun=False)
        engine = place.engine()
        engine.adopt([attempt_of(place, one) for one in prepared])
        assert kinds(place.ended(engine, 2)) == {1: OutcomeKind.NEVER_STARTED, 2: OutcomeKind.NEVER_STARTED}
        assert place.runs(1) == place.runs(2) == 0

    def test_an_attempt_that_never_started_may_be_prepared_again_under_its_number(self, place: Place) -> None:
        place.die([place.launch(1, "fails")], begun=False)
        engine = place.engine()
        engine.adopt([])
        engine.prepare(place.launch(1, "succeeds"), None)
        engine.start_prepared()
        assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.SUCCEEDED}

    def test_a_running_attempt_outlives_its_daemon_and_the_next_one_reports_its_end(self, place: Place) -> None:
        [prepared] = place.die([place.launch(2, "waits")], begun=True)
        unknown = attempt_of(place, msgspec.structs.replace(prepared, job_id=1))
        engine = place.engine()
        engine.adopt([unknown, attempt_of(place, prepared)])
        assert kinds(place.ended(engine, 1)) == {1: OutcomeKind.NEVER_STARTED}, "an attempt unknown to the engine"
        assert engine.ended() == []
        place.let_go(2)
        assert kinds(place.ended(engine, 1)) == {2: OutcomeKind.SUCCEEDED}
        assert place.runs(2) == 1

    def test_an_end_that_was_not_recorded_is_reported_again_to_the_next_daemon(self, place: Place) -> None:
        first = place.engine()
        prepared = first.prepare(place.launch(1, "fails"), None)
        first.start_prepared()
        ends = place.ended(first, 1)
        second = place.engine()
        second.adopt([attempt_of(place, prepared)])
        again = place.ended(second, 1)
        assert [(one.outcome.kind, one.outcome.status) for one in again] == [(OutcomeKind.FAILED, 3)]
        assert kinds(again) == kinds(ends)

    def test_an_attempt_whose_supervisor_was_killed_is_lost(self, place: Place) -> None:
        engine = place.engine()
        prepared = engine.prepare(place.launch(1, "waits"), None)
        engine.start_prepared()
        wait_until_running(place, 1)
        place.kill_supervisor(prepared)
        ends = place.ended(engine, 1)
        assert kinds(ends) == {1: OutcomeKind.LOST}, ends
        engine.signal(attempt_of(place, prepared), signal.SIGKILL)

    def test_a_signal_reaches_the_program_and_its_supervisor_reports_the_end(self, place: Place) -> None:
        engine = place.engine()
        prepared = engine.prepare(place.launch(1, "waits"), None)
        engine.start_prepared()
        attempt = attempt_of(place, prepared)
        wait_until_running(place, 1)
        assert engine.signal(attempt, signal.SIGTERM) >= 1
        [end] = place.ended(engine, 1)
        assert end.outcome.kind in ended_by_signal(place)
        assert end.outcome.status == 128 + signal.SIGTERM
        assert engine.signal(attempt, signal.SIGTERM) == 0

    def test_a_command_with_a_null_byte_is_a_user_error(self, place: Place) -> None:
        engine = place.engine()
        launch = place.launch(1, "succeeds")
        with pytest.raises(UserError):
            engine.prepare(msgspec.structs.replace(launch, command=(*launch.command, "\0")), None)
        engine.prepare(place.launch(2, "succeeds"), None)
        engine.start_prepared()
        assert kinds(place.ended(engine, 1)) == {2: OutcomeKind.SUCCEEDED}

    def test_a_closed_engine_leaves_running_attempts_to_the_next_daemon(self, place: Place) -> None:
        first = place.engine()
        prepared = first.prepare(place.launch(1, "waits"), None)
        first.start_prepared()
        wait_until_running(place, 1)
        first.close()
        second = place.engine()
        second.adopt([attempt_of(place, prepared)])
        place.let_go(1)
        assert kinds(place.ended(second, 1)) == {1: OutcomeKind.SUCCEEDED}
        assert place.runs(1) == 1

    def test_only_an_engine_that_places_work_reports_its_place_before_the_end(self, place: Place) -> None:
        engine = place.engine()
        before = time.time()
        engine.prepare(place.launch(1, "waits"), None)
        engine.start_prepared()
        statuses: list[SiteStatus] = []

        def conditionmewhere() -> bool:
            statuses.extend(engine.site_changes())
            return any(each.place for each in statuses)

        if place.places_work:
            until(conditionmewhere, "a place where it runs")
        wait_until_running(place, 1)
        place.let_go(1)
        ends = place.ended(engine, 1)
        statuses += engine.site_changes()
        assert kinds(ends) == {1: OutcomeKind.SUCCEEDED}
        assert bool(statuses) is place.places_work
        assert {(each.job_id, each.attempt) for each in statuses} <= {(1, 1)}
        assert all(each.at is None or before - 1 <= each.at <= time.time() + 1 for each in statuses)
        assert engine.site_changes() == []
        engine.prepare(place.launch(2, "succeeds"), None)
        engine.start_prepared()
        place.ended(engine, 1)
        assert any(each.place for each in engine.site_changes()) is place.places_work, "a short one, with its end"
