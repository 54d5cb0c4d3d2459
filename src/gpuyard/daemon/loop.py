"""The scheduler loop: runs the controller in the event loop. It steps when something happened, else it sleeps.

A step follows an attempt's end, a request, a sample of the machine, the end of another program's lease, or a timer.
A step that fails because the disk is full is retried; nothing that was acknowledged is lost.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from gpuyard.config import config_fault, config_stamp, lease_dir
from gpuyard.daemon.loop_wakeups import FinishSignal, HomeWatch, LedgerWatch, StepTimer
from gpuyard.daemon.monitor.sampling import SampleLogs, SamplingThread
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.errors import GpuyardError, StoreFault
from gpuyard.ledger.ledger import QueueLedger
from gpuyard.model.job import Attempt, Started
from gpuyard.model.lease import Holder
from gpuyard.policy.device_health import drain_notice
from gpuyard.ports import Clock, Engine
from gpuyard.queue.configured_rules import read_rules
from gpuyard.queue.step import Controller, Step
from gpuyard.queue.user_requests import UserRequests
from gpuyard.store.checkpoints import CheckpointThread
from gpuyard.store.damaged_rows import KEPT_ROWS, may_be_a_row, set_aside
from gpuyard.store.database import Database, convert_sqlite_errors
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.system.system_limits import passing_limit, remedy_of

_log = logging.getLogger(__name__)
# A sample up to 0.25 s old is fresh enough to start jobs; otherwise a new one is requested first.
_SOON_OLD_S = 0.2
_RETRY_S = 1.0
# After a step that took this long, requests that have arrived meanwhile are served for a while.
_LONG_STEP_S, _FOR_OTHERS_S = 0.01, 0.002
# Between two steps that settle the dependants of one job: other requests are served.
_PIECE_PAUSE_S = 0.001


class SchedulerLoop:
    def __init__(  # noqa: PLR0913 - the ports
        self,
        database: Database,
        queue_ledger: QueueLedger,
        engine: LocalEngine,
        clock: Clock,
        me: Holder,
        *,
        suspender: LocalSuspender,
        open_engine: Callable[[str], Engine] | None = None,
        home: HomeWatch | None = None,
    ) -> None:
        self.database = database
        self.store = JobStore(database)
        self.queries = QueueQueries(database, self.store)
        self.controller = Controller(
            self.store,
            queue_ledger,
            engine,
            clock,
            rules=read_rules(),
            me=me,
            suspender=suspender,
            open_engine=open_engine,
        )
        self.requests = UserRequests(self.controller, self.store, self.queries, clock)
        self.finish_signal = FinishSignal()
        self.sampling: SamplingThread
        self.notices: list[str] = []
        self.sample_logs = SampleLogs()
        self.step_s: float | None = None
        # Called after each step, so after each change and each sample; they have to return quickly.
        self.listeners: list[Callable[[Step], None]] = []
        # What else users should know at this moment.
        self.notice_sources: list[Callable[[], Iterable[str]]] = []
        # Called when a changed configuration has been read.
        self.config_listeners: list[Callable[[], None]] = []
        self.problem: str | None = None  # why steps fail now
        self.fatal_fault: asyncio.Future[StoreFault]
        self.ledger = queue_ledger.ledger
        self._queue_ledger, self._engine, self._suspender, self.clock = queue_ledger, engine, suspender, clock
        self._loop: asyncio.AbstractEventLoop
        self._next_step: asyncio.Handle | None = None
        self._timer = StepTimer(self.controller, engine, clock, self._on_timer)
        self.checkpoints = CheckpointThread(database, self.wake)
        self.notice_sources.append(self.checkpoints.notices)
        self._home = home or HomeWatch(lambda: True, "")
        self._ledger_watch = LedgerWatch(queue_ledger.ledger.folder, self._on_ledger_change)
        self._finished = 0
        self._others_until = 0.0  # no step before this time of the loop
        self._is_watching_engine = False
        self._is_closed = False
        self._next_check = 0.0  # of all rows
        self._config_stamp = config_stamp()

    def start(self, sampling: SamplingThread) -> None:
        """Take over running attempts and start stepping."""
        self._loop = asyncio.get_running_loop()
        self.fatal_fault = self._loop.create_future()
        self.sampling = sampling
        self.checkpoints.start()
        self._queue_ledger.turns.on_turn = partial(self._loop.call_soon_threadsafe, self._on_ledger_turn)
        # While changes are paused no step can run: a turn then would keep the ledger from others for nothing.
        self._queue_ledger.turns.can_use_turn = lambda: not self.checkpoints.is_paused
        self.controller.recover()
        self._watch_engine(is_wanted=True)
        self._home.watch(self.wake)
        self.wake()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._watch_engine(is_wanted=False)
        self._ledger_watch.set(is_wanted=False)
        if self._next_step is not None:
            self._next_step.cancel()
        self._timer.cancel()
        self.checkpoints.close()
        self._home.close()
        self._queue_ledger.turns.close()
        self._queue_ledger.return_ticket()
        self.sampling.close()
        self._suspender.close()
        self.controller.engines.close()
        self._engine.close()

    def wake(self) -> None:
        """Schedule a step; calls before it runs share that step."""
        if self._next_step is None and not self._is_closed:  # a request may finish after close
            self._next_step = self._loop.call_soon(self._step)

    @contextlib.contextmanager
    def during_change(self) -> Iterator[None]:
        """Wrap a request that may change the queue: meanwhile no job waits for its turn in a slice."""
        self.controller.slices.begin_change()
        try:
            yield
        finally:
            self.controller.slices.end_change()
            self.wake()

    async def settle_slices(self) -> None:
        """Wait until no job waits for its turn in a slice: a keeper gives back within some 10 ms what it has not begun.
        One that is stopped is not waited for any longer, and the change leaves its jobs as they are."""
        until = self._loop.time() + 2.0
        while self.controller.slices.has_upcoming and self._loop.time() < until:
            self.wake()
            await asyncio.sleep(0.002)

    async def take_back(self, job_ids: Collection[int]) -> None:
        """Wait until these jobs, which wait at a cluster, are queued here or have begun. A cluster that does not answer
        is not waited for any longer."""
        until = self._loop.time() + 10.0
        dispatch, left = self.controller.cluster_dispatch, set(job_ids)
        dispatch.take_back(left)
        while left and self._loop.time() < until:
            await asyncio.sleep(0.02)
            left &= {each.job.id for each in dispatch.waiting_there()}

    def fail(self, error: StoreFault) -> None:
        """End the daemon because its database is damaged, which the next daemon sets aside, or its folder is gone."""
        if not self.fatal_fault.done():
            self.fatal_fault.set_result(error)

    def all_notices(self) -> list[str]:
        """Return what users should know: what happened at the start, and what is wrong at this moment."""
        fault = None if self.controller.start_pauses.config_fault else config_fault()
        fault = fault and f"{fault}; the settings before this change stay in force"
        now = filter(None, (self.problem, fault, self._home.problem, self.controller.own_leases.notice))
        more = (notice for source in self.notice_sources for notice in source())
        snapshot = self.sampling.latest.snapshot
        drains = (drain_notice(each, snapshot.label(each.device_id)) for each in self.ledger.read_drains())
        disks = self.controller.disk_gate.notices(self.controller.rules.host.min_free_disk_mb)
        pauses = (*self.controller.start_pauses.notices(), *disks)
        nodes = self.controller.cluster_dispatch.notices(self.clock.now())
        return [*self.notices, *now, *drains, *more, *pauses, *nodes, *self._engine.problems()]

    @property
    def home_problem(self) -> str | None:
        """Why this daemon accepts no more jobs: its folder is gone."""
        return self._home.problem

    def with_own_pid(self, attempt: Attempt) -> Attempt:
        """Return a live attempt with the pid of its program, if it runs on this machine and is known."""
        if attempt.engine or not isinstance(attempt.phase, Started):
            return attempt
        return replace(attempt, phase=replace(attempt.phase, pid=self._engine.pid_of(attempt)))

    # A step

    def _step(self) -> None:
        if self._next_step is not None:
            self._next_step.cancel()
            self._next_step = None
        if self._is_put_off():
            return
        self._watch_engine(is_wanted=True)
        started = time.perf_counter()
        try:
            with convert_sqlite_errors():
                step = self._step_controller()
        except Exception as error:  # noqa: BLE001 - the outermost place
            # A bug must not end the queue: the controller reads again from the store what was not committed.
            self._handle_failure(error)
            return
        self.problem = None
        self.step_s = time.perf_counter() - started
        if self.step_s > _LONG_STEP_S:
            self._others_until = self._loop.time() + _FOR_OTHERS_S
        if self.controller.transitions.finished != self._finished:
            self._finished = self.controller.transitions.finished
            self._timer.settle()
            self.finish_signal.announce()
        self._watch_memory()
        self._timer.set(step)
        self._ledger_watch.set(is_wanted=step.waits_for_others)
        if self._home.problem is not None and not self.controller.transitions.live:
            self.fail(StoreFault(f"the daemon ends: no job of it runs any more, and {self._home.problem}"))
        for listener in self.listeners:
            try:
                listener(step)
            except Exception:  # noqa: BLE001 - a bug in metrics or notifications must not stop the queue
                _log.exception("a listener failed after a step")

    def _is_put_off(self) -> bool:
        """Whether the step has to wait; then it follows by itself."""
        pause_s = self._others_until - self._loop.time()
        is_paused = self.checkpoints.is_paused  # which wakes us at its end
        if pause_s > 0 or is_paused:
            self._watch_engine(is_wanted=False)  # it would wake the loop again and again until then
        if pause_s > 0 and not is_paused:
            self._next_step = self._loop.call_later(pause_s, self._step)
        return pause_s > 0 or is_paused

    def _step_controller(self) -> Step:
        self._reload_changed_config()
        if self._home.has_lost_home() and self.controller.closed is None:
            self.controller.closed = self._home.problem
            _log.error("%s", self._home.problem)
        is_fresh = self.sampling.age() <= 0.25
        step = self.controller.step(self.sampling.latest, is_fresh=is_fresh)
        is_wanted = (not is_fresh or step.is_outdated) and (
            (not self.store.setting("paused") and self.store.has_ready()) or self.controller.suspend_control.has_waiting
        )
        # Before it is too old: the next slice starts without waiting for one.
        is_wanted = is_wanted or (self.controller.slices.has_upcoming and self.sampling.age() > _SOON_OLD_S)
        if is_wanted or step.needs_sample or self.controller.batch_gates.wants_sample(self.clock.now()):
            self.sampling.request()  # wakes us when it is there
        self.sample_logs.write(self.controller.batch_gates.take_rows())
        try:  # a piece per step; on a full disk again after a while
            if self.requests.drop_refused() or self.requests.revive_more():
                self._loop.call_later(_PIECE_PAUSE_S, self.wake)
        except StoreFault:
            self._loop.call_later(_RETRY_S, self.wake)
        if self.controller.transitions.dependants.has_more:
            self._loop.call_later(_PIECE_PAUSE_S, self.wake)
        return step

    def prepare_to_start(self) -> None:
        """Start the keeper and take a sample, if jobs that are about to be stored would have to wait for them."""
        self.controller.engines.is_ready()
        if self.sampling.age() > _SOON_OLD_S:
            self.sampling.request()

    def on_memory(self) -> None:
        """Note the memory of a growing first run, and RAM, which are read often. A step follows if a job makes way."""
        if self._is_closed or self.checkpoints.is_paused:
            return
        if self.problem is None and self.controller.observe(self.sampling.latest):
            self.wake()
        self._watch_memory()

    def _watch_memory(self) -> None:
        devices = self.controller.memory_guard.watched if self.controller.transitions.live else frozenset()
        self.sampling.watch(devices, self.controller.host_guard.watch_every_s)

    def _reload_changed_config(self) -> None:
        """A changed file applies from this step on; while it cannot be read the old settings stay."""
        stamp = config_stamp()
        if stamp == self._config_stamp:
            return
        self._config_stamp = stamp
        self.controller.rules = read_rules()
        if config_fault() is not None:
            _log.error("the settings before this change stay in force")
            return
        for reload in self.config_listeners:
            reload()
        pauses = self.controller.start_pauses
        if pauses.config_fault is not None:
            is_here = os.path.realpath(lease_dir()) == os.path.realpath(self.ledger.folder)
            restart = "config.toml names another lease directory: run `gpuyard daemon restart`"
            pauses.note_config(None if is_here else restart)

    # Faults

    def _handle_failure(self, error: Exception) -> None:
        if self.set_rows_aside(error):
            self.wake()
        elif isinstance(error, StoreFault):
            self._handle_fault(error)
        elif (limit := passing_limit(error)) is not None:
            self._retry_later(f"the queue cannot go on: {limit.strerror} ({remedy_of(limit)})")
        else:
            _log.exception("a step failed", exc_info=error)
            self._retry_later(f"a step failed, which is a bug: {type(error).__name__}: {error}")

    def set_rows_aside(self, error: Exception) -> bool:
        """After a failure: set rows aside that cannot be read. Return False if there are none, and it had another
        cause. All rows are read: not again before 20 times as long has passed as that took."""
        now = time.monotonic()
        if now < self._next_check or not may_be_a_row(error) or self.checkpoints.is_paused:
            return False
        notes: list[str] = []
        with contextlib.suppress(GpuyardError), convert_sqlite_errors():
            with self.store.transaction():
                notes = set_aside(self.database.connection, str(self.database.path.with_name(KEPT_ROWS)))
            if notes:
                self.store.forget()
                self.controller.transitions.reload()
        self._next_check = now + 20 * (time.monotonic() - now)
        for note in notes:
            _log.error("%s", note)
        self.notices += notes
        return bool(notes)

    def _handle_fault(self, error: StoreFault) -> None:
        """Nothing was committed. Retry after a full disk; end the daemon if the database is damaged."""
        if error.is_damage:
            self.fail(error)
        else:
            self._retry_later(str(error))

    def _retry_later(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            _log.error("%s; retrying every %g s", problem, _RETRY_S)
        self._watch_engine(is_wanted=False)  # it would keep reporting ends that cannot be recorded
        self._timer.retry_after(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._watch_engine(is_wanted=True)
        self._step()

    # What wakes the loop

    def _on_timer(self) -> None:
        try:
            with convert_sqlite_errors():
                has_ready = self.store.has_ready()
        except StoreFault as error:
            self._handle_fault(error)
            return
        if has_ready or self.controller.transitions.live:
            self.sampling.request()
        else:
            self.wake()

    def _watch_engine(self, *, is_wanted: bool) -> None:
        if is_wanted == self._is_watching_engine:
            return
        self._is_watching_engine = is_wanted
        for descriptor in (self._engine.fileno(), self._suspender.fileno()):
            if descriptor >= 0 and is_wanted:
                self._loop.add_reader(descriptor, self._step)
            elif descriptor >= 0:
                self._loop.remove_reader(descriptor)

    def _on_ledger_turn(self) -> None:
        """The ledger is locked for one step of ours, or was busy for too long."""
        try:
            if not self._is_closed:
                self._others_until = 0.0
                self._step()
        finally:
            self._queue_ledger.turns.end_turn()

    def _on_ledger_change(self) -> None:
        self._timer.settle()
        self.sampling.request()
