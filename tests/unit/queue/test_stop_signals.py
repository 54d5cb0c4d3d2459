"""When a program is warned, asked to stop and killed, over restarts of the daemon and sleeps of the machine."""

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuyard.model.job import Attempt, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import RetryCause, StopWarning
from gpuyard.model.lifecycle import JobState
from gpuyard.ports import Signalling
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.stop_signals import MachineSleep, StopSignals
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb

USR1 = int(signal.SIGUSR1)
WARNING = StopWarning(signum=USR1, lead_s=60.0)


class Program:
    """A program that handles a signal or not, and the signals that it got."""

    def __init__(self, *, handles: bool = True) -> None:
        self.handles = handles
        self.got: list[int] = []

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> Sequence[int | None]:
        is_handled = self.handles or how is not Signalling.HANDLERS
        self.got += [int(signum) for _ in attempts if is_handled]
        return [int(is_handled) for _ in attempts]


class Daemon:
    """The part of a step that sends signals."""

    def __init__(self, queue_db: QueueDb, program: Program) -> None:
        self.queue_db = queue_db
        self.transitions = JobTransitions(queue_db.store)
        self.transitions.reload()
        self.signals = StopSignals(self.transitions, cast("EngineSet", program))

    def step(self, now: float) -> float | None:
        """Return when the next step is due."""
        with self.queue_db.store.transaction():
            self.signals.record_warnings(now)
            self.signals.stop_overdue(now)
        self.signals.send(now)
        return min(self.signals.wake_times(now), default=None)

    def events(self, job_id: int) -> list[tuple[str, str | None]]:
        return [(kind, text) for _, kind, text in self.queue_db.queries.events(job_id)]


def start(queue_db: QueueDb, stop_at: float | None = 1000.0, **spec: Any) -> int:
    (job_id,) = queue_db.add(warning=WARNING, grace_s=10.0, **spec)
    phase = Started(at=100.0, keeper_pid=9)
    queue_db.store.start_attempt(Attempt(job_id=job_id, number=1, phase=phase, boot_id="b", stop_at=stop_at))
    return job_id


def test_a_program_is_warned_once_then_stopped_then_killed(queue_db: QueueDb) -> None:
    job_id, program = start(queue_db), Program()
    daemon = Daemon(queue_db, program)
    assert daemon.step(500.0) == 940.0
    assert (daemon.step(940.0), program.got) == (940.0, [USR1])  # the next step, which records it, follows at once
    assert (daemon.step(940.1), program.got) == (1000.0, [USR1])
    assert daemon.events(job_id) == [("warned", "signal USR1 to 1 process, 59s before its time limit")]
    assert (daemon.step(1000.0), program.got) == (1010.0, [USR1, signal.SIGTERM])
    daemon.step(1010.0)
    assert program.got == [USR1, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_program_that_ends_while_it_is_warned_counts_as_warned(queue_db: QueueDb, *, is_counted: bool) -> None:
    """A thread has sent the signal; the program saved and ended before the next step, which would record the warning.
    Else the job would fail in place of being queued again."""
    job_id, program = start(queue_db), Program()
    daemon, counts = Daemon(queue_db, program), [None, 1 if is_counted else None]

    def signal_each(attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL) -> Sequence[int | None]:
        return (
            [counts.pop(0) for _ in attempts] if how is Signalling.HANDLERS else program.signal_each(attempts, signum)
        )

    daemon.signals = StopSignals(daemon.transitions, cast("EngineSet", SimpleNamespace(signal_each=signal_each)))
    daemon.signals.send(940.0)
    with queue_db.store.transaction():
        daemon.signals.record_warnings(940.2, ended={job_id})
    who = "1 process" if is_counted else "its processes"
    assert daemon.events(job_id) == [("warned", f"signal USR1 to {who}, 59s before its time limit")]
    assert daemon.transitions.live[job_id].attempt.warned_at == 940.2


def test_the_next_daemon_neither_loses_the_warning_nor_sends_it_again(queue_db: QueueDb) -> None:
    start(queue_db)
    program = Program()
    assert Daemon(queue_db, program).step(500.0) == 940.0
    second = Daemon(queue_db, program)
    second.step(950.0)
    second.step(950.1)
    assert program.got == [USR1]
    assert Daemon(queue_db, program).step(960.0) == 1000.0
    assert program.got == [USR1]


def test_a_program_whose_warning_was_missed_gets_its_time_first(queue_db: QueueDb) -> None:
    start(queue_db)
    program = Program()
    daemon = Daemon(queue_db, program)  # none ran for a while
    daemon.step(2000.0)
    assert (daemon.step(2000.1), program.got) == (2060.0, [USR1])
    daemon.step(2060.0)
    assert program.got == [USR1, signal.SIGTERM]


@pytest.mark.parametrize("late_s", [0.0, 20.0])
def test_a_program_that_handles_the_signal_later_gets_it_later_and_is_stopped(queue_db: QueueDb, late_s: float) -> None:
    start(queue_db)
    program = Program(handles=False)
    daemon = Daemon(queue_db, program)
    now: float | None = 500.0
    while now is not None and now < 1010.0:
        program.handles = bool(late_s) and now >= 940.0 + late_s
        now = max(daemon.step(now) or 1e9, now + 0.01)
    assert program.got == ([USR1, signal.SIGTERM] if late_s else [signal.SIGTERM])


def test_a_preempted_program_is_warned_at_once_and_has_its_time_to_save(queue_db: QueueDb) -> None:
    job_id, program = start(queue_db, stop_at=None), Program()
    daemon = Daemon(queue_db, program)
    assert daemon.step(200.0) is None
    with queue_db.store.transaction():
        daemon.transitions.stop(job_id, OutcomeKind.PREEMPTED, 200.0)
    assert "has 1m to save its work" in (queue_db.job(job_id).reason or "")
    daemon.step(200.0)
    assert (daemon.step(200.1), program.got) == (260.0, [USR1])
    assert (daemon.step(260.0), program.got) == (270.0, [USR1, signal.SIGTERM])


def test_a_program_that_was_warned_already_is_not_warned_again_when_it_is_preempted(queue_db: QueueDb) -> None:
    job_id, program = start(queue_db), Program()
    daemon = Daemon(queue_db, program)
    daemon.step(940.0)
    daemon.step(940.0)
    with queue_db.store.transaction():
        daemon.transitions.stop(job_id, OutcomeKind.PREEMPTED, 950.0)
    assert (daemon.step(950.0), program.got) == (1000.0, [USR1])


def test_a_cancelled_program_is_stopped_at_once_also_while_it_saves(queue_db: QueueDb) -> None:
    job_id, program = start(queue_db, stop_at=None), Program()
    daemon = Daemon(queue_db, program)
    with queue_db.store.transaction():
        daemon.transitions.stop(job_id, OutcomeKind.PREEMPTED, 200.0)
    daemon.step(200.0)
    with queue_db.store.transaction():
        assert daemon.transitions.cancel_instead(job_id, 210.0)
    assert (daemon.step(210.0), program.got) == (220.0, [USR1, signal.SIGTERM])


def test_a_sleep_of_the_machine_postpones_the_warning(queue_db: QueueDb) -> None:
    start(queue_db)
    program = Program()
    daemon = Daemon(queue_db, program)
    with queue_db.store.transaction():
        MachineSleep(daemon.transitions, "b").record(0.0, 500.0)
        MachineSleep(daemon.transitions, "b").record(300.0, 800.0)
    assert (daemon.step(945.0), program.got) == (1240.0, [])


@pytest.mark.parametrize(("status", "state"), [(75, JobState.DELAYED), (0, JobState.SUCCEEDED)])
def test_a_warned_program_has_timed_out_unless_it_succeeded(queue_db: QueueDb, status: int, state: JobState) -> None:
    job_id = start(queue_db, retries=1, retry_on=(RetryCause.TIMEOUT,), retry_delay_s=5.0)
    daemon = Daemon(queue_db, Program())
    daemon.step(940.0)  # it ends before the next step, which records that it was warned
    kind = OutcomeKind.FAILED if status else OutcomeKind.SUCCEEDED
    outcome = Outcome(kind=kind, status=status, reason=f"exit status {status}" if status else None)
    with queue_db.store.transaction():
        daemon.signals.record_warnings(941.0)
        daemon.transitions.end(job_id, outcome, 950.0)
    assert queue_db.job(job_id).state is state
    if status:
        assert queue_db.job(job_id).outcome == Outcome(
            kind=OutcomeKind.TIMED_OUT, status=75, reason="exit status 75 after the signal before its time limit"
        )


class SlowEngine(Program):
    """Tells how many processes got a signal only when it is asked a second time."""

    def __init__(self, *, handles: bool = True) -> None:
        super().__init__(handles=handles)
        self.under_way: set[int] = set()

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> list[int | None]:
        return self._later(attempts, signum, int(self.handles or how is not Signalling.HANDLERS))

    def _later(self, attempts: Sequence[Attempt], signum: int, count: int) -> list[int | None]:
        if not attempts:
            return []
        if signum in self.under_way:
            self.under_way.discard(signum)
            return [count for _ in attempts]
        self.under_way.add(signum)
        self.got += [int(signum)]
        return [None for _ in attempts]


def test_a_number_that_the_engine_knows_later_is_asked_for_and_no_stop_waits_for_it(queue_db: QueueDb) -> None:
    job_id, program = start(queue_db), SlowEngine()
    daemon = Daemon(queue_db, program)
    assert (daemon.step(940.0), program.got) == (1000.0, [USR1])  # the engine wakes the loop earlier
    assert daemon.step(940.1) == 1000.0, "the step that it was woken for records the number"
    assert daemon.events(job_id) == [("warned", "signal USR1 to 1 process, 59s before its time limit")]
    daemon.step(1000.0)
    assert program.got == [USR1, signal.SIGTERM]
    assert daemon.step(1000.1) == 1010.0
    assert daemon.step(1000.2) == 1010.0
    assert program.got == [USR1, signal.SIGTERM]
    start(queue_db)
    program = SlowEngine()
    daemon = Daemon(queue_db, program)
    daemon.step(940.0)
    daemon.step(1000.0)
    assert program.got == [USR1, signal.SIGTERM]
