"""The scheduler: the controller in the event loop. It steps when something has happened, and otherwise sleeps.

What makes it step: an attempt's end, a request, a look at the machine, a lease of somebody else's that ended, a time
that has come. A step that fails for want of disk is tried again; nothing that was acknowledged is lost by it.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from gpuyard.config import config_stamp, load_config
from gpuyard.control.controller import Controller
from gpuyard.control.step import Rules, Step
from gpuyard.control.user_requests import UserRequests
from gpuyard.core.device_names import banned_ids
from gpuyard.core.job.job import Attempt
from gpuyard.core.lease import Holder
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.plan import SchedulingLimits
from gpuyard.core.snapshot import Snapshot
from gpuyard.daemon.api.wait_for_jobs import FinishSignal
from gpuyard.daemon.monitor.sample_logs import SampleLogs
from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.local.job_logs import rotate_if_over
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.errors import StoreFault, UserError
from gpuyard.leases.file_watch import FileWatch
from gpuyard.leases.queue_ledger import QueueLedger
from gpuyard.ports import Clock, Engine
from gpuyard.store.database import Database, convert_sqlite_errors
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

_log = logging.getLogger(__name__)
# A look this old will do for a start; where it does not, a new one is taken.
_FRESH_S = 0.25
_SETTLE_S = (0.002, 0.01, 0.05, 0.25)
_LOOK_AGAIN_S = 1.0
_TRY_AGAIN_S = 1.0
_TIMER_EARLY_S = 0.5
_CONFIGURED_EVERY_S = 2.0
_LOGS_EVERY_S = 5.0
_WITHOUT_NOTICE_S = 0.1
_MEASURE_S, _MEASURE_RAM_S = 1.0, 5.0
_MEASURE_NEW_S, _NEW_S = 0.25, 2.0


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
        # Told after each step, which is after each change and each look; what they do has to be quick.
        self.listeners: list[Callable[[Step], None]] = []
        # Told when the configuration has become another one that can be read.
        self.config_listeners: list[Callable[[], None]] = []
        self.fatal_fault: asyncio.Future[StoreFault]
        self.ledger = queue_ledger.ledger
        self._queue_ledger = queue_ledger
        self._engine = engine
        self._suspender = suspender
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._notice: FileWatch | None = None
        self._finished = 0
        self._settled = len(_SETTLE_S)
        self._logs_timer: asyncio.TimerHandle | None = None
        self._problem: str | None = None
        self._is_closed = False
        self._configuration = config_stamp()
        self._configured_at = 0.0

    def start(self, sampling: SamplingThread) -> None:
        """Takes over what runs, and begins to step."""
        self._loop = asyncio.get_running_loop()
        self.fatal_fault = self._loop.create_future()
        self.sampling = sampling
        self.controller.recover()
        self._listen(is_wanted=True)
        self.wake()

    def _listen(self, *, is_wanted: bool) -> None:
        for descriptor in (self._engine.fileno(), self._suspender.fileno()):
            if descriptor >= 0 and is_wanted:
                self._loop.add_reader(descriptor, self._step)
            elif descriptor >= 0:
                self._loop.remove_reader(descriptor)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._listen(is_wanted=False)
        self._watch_ledger(is_wanted=False)
        for handle in (self._soon, self._timer, self._logs_timer):
            if handle is not None:
                handle.cancel()
        self._queue_ledger.leave_line()
        self.sampling.close()
        self._suspender.close()
        self.controller.engines.close()

    def wake(self) -> None:
        """Something has happened: a step follows, one for all that happens until then."""
        if self._soon is None and not self._is_closed:  # a request may end after it
            self._soon = self._loop.call_soon(self._step)

    def _step(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        began = time.perf_counter()
        try:
            with convert_sqlite_errors():
                step = self._step_controller()
        except StoreFault as error:
            self._suffer(error)
            return
        except Exception as error:  # noqa: BLE001 - the outermost place
            # A bug of ours must not end the queue: what was not committed is made anew from the store.
            _log.exception("a step failed")
            self._pause(f"a step failed, which is a bug: {type(error).__name__}: {error}")
            return
        self._problem = None
        self.step_s = time.perf_counter() - began
        if self.controller.transitions.finished != self._finished:
            self._finished = self.controller.transitions.finished
            self._settled = 0
            self.finish_signal.tell()
        self._rest(step)
        self._tell(step)

    def _tell(self, step: Step) -> None:
        for listener in self.listeners:
            try:
                listener(step)
            except Exception:  # noqa: BLE001 - who looks on must not hold up who works, nor others who look on
                _log.exception("a step could not be told")

    def _step_controller(self) -> Step:
        self._follow_configuration()
        is_fresh = self.sampling.age() <= _FRESH_S
        step = self.controller.step(self.sampling.latest, may_start=is_fresh)
        is_fresh = is_fresh and not self.controller.is_outdated(self.sampling.latest)
        is_wanted = not is_fresh and (self._has_ready() or self.controller.suspend_control.has_waiting)
        if is_wanted or self.controller.batch_gates.wants_sample(self._clock.now()):
            self.sampling.request()  # it wakes us when it has come
        self.sample_logs.write(self.controller.batch_gates.take_rows())
        return step

    def _has_ready(self) -> bool:
        return not self.store.setting("paused") and self.store.has_ready()

    def _follow_configuration(self) -> None:
        """What the file says counts from the next step on; one that cannot be read changes nothing."""
        now = self._clock.monotonic()
        if now < self._configured_at + _CONFIGURED_EVERY_S:
            return
        self._configured_at = now
        stamp = config_stamp()
        if stamp != self._configuration:
            self._configuration = stamp
            try:
                self.controller.rules = read_rules()
                for follow in self.config_listeners:
                    follow()
            except UserError as error:
                _log.error("%s; what it said before holds", error)

    def _rest(self, step: Step) -> None:
        waits = [] if step.wake_at is None else [max(0.0, step.wake_at - self._clock.now())]
        if self.controller.batch_gates.is_waiting:
            waits.append(_LOOK_AGAIN_S)  # its averages need looks even while its runs are as many as may be
        if step.waits_for_devices:
            waits.append(self._next_look() if step.waits_for_sample else _LOOK_AGAIN_S)
        if self.controller.transitions.live:
            waits.append(self._next_measurement() if self._engine.fileno() >= 0 else _WITHOUT_NOTICE_S)
        self._sleep(min(waits) if waits else None)
        self._watch_ledger(is_wanted=step.waits_for_devices and self._others_are_in_the_way())
        transitions = self.controller.transitions
        if (transitions.live or transitions.ended_logs) and self._logs_timer is None:
            self._logs_timer = self._loop.call_later(_LOGS_EVERY_S, self._trim_logs)

    def _sleep(self, seconds: float | None) -> None:
        """A timer that would wake us a little early stays: to set one for each of a thousand steps a second costs."""
        due = None if seconds is None else self._loop.time() + seconds
        if self._timer is not None:
            if due is not None and due - _TIMER_EARLY_S <= self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._look)

    def _next_look(self) -> float:
        """Soon after a job has ended: a driver takes a while to give back its memory."""
        if self._settled < len(_SETTLE_S):
            self._settled += 1
            return _SETTLE_S[self._settled - 1]
        return _LOOK_AGAIN_S

    def _next_measurement(self) -> float:
        """What runs on a device is measured each second, and more often while it is new."""
        transitions = self.controller.transitions
        if not any(live.attempt.devices for live in transitions.live.values()):
            return _MEASURE_RAM_S
        return _MEASURE_NEW_S if self._clock.now() - transitions.begun_at < _NEW_S else _MEASURE_S

    def _look(self) -> None:
        self._timer = None
        try:
            with convert_sqlite_errors():
                has_ready = self.store.has_ready()
        except StoreFault as error:
            self._suffer(error)
            return
        if has_ready or self.controller.transitions.live:
            self.sampling.request()
        else:
            self.wake()

    def fail(self, error: StoreFault) -> None:
        """On a damaged database: the next daemon sets it aside."""
        if not self.fatal_fault.done():
            self.fatal_fault.set_result(error)

    def _suffer(self, error: StoreFault) -> None:
        """Nothing was changed. A full disk may have room again; a damaged database needs a new start."""
        if error.is_damage:
            self.fail(error)
        else:
            self._pause(str(error))

    def _pause(self, trouble: str) -> None:
        if trouble != self._problem:
            self._problem = trouble
            _log.error("%s; tried again every %g s", trouble, _TRY_AGAIN_S)
        if self._timer is not None:
            self._timer.cancel()
        self._listen(is_wanted=False)  # they would go on telling of what cannot be recorded
        self._timer = self._loop.call_later(_TRY_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self._listen(is_wanted=True)
        self._step()

    @property
    def problem(self) -> str | None:
        """What keeps it from working, where something does."""
        return self._problem

    def with_own_pid(self, attempt: Attempt) -> Attempt:
        """One that lives, with the pid of its program rather than its keeper's, once it has one."""
        return attempt if attempt.engine else replace(attempt, pid=self._engine.pid_of(attempt) or attempt.pid)

    # Others who hold devices

    def _others_are_in_the_way(self) -> bool:
        plan, me = self.controller.plan, self.controller.me
        reasons = (reason for job in plan.waiting for reason in job.reasons)
        return any(holder.pid != me.pid for reason in reasons for holder in reason.holders)

    def _watch_ledger(self, *, is_wanted: bool) -> None:
        if is_wanted == (self._notice is not None):
            return
        if self._notice is not None:
            self._loop.remove_reader(self._notice.fileno())
            self._notice.give_back()
            self._notice = None
            return
        notice = FileWatch(self._queue_ledger.ledger.folder)
        if notice.fileno() < 0:
            notice.give_back()
            return
        self._notice = notice
        self._loop.add_reader(notice.fileno(), self._ledger_changed)

    def _ledger_changed(self) -> None:
        if self._notice is not None:
            self._notice.clear()
        self._settled = 0
        self.sampling.request()

    # Logs

    def _trim_logs(self) -> None:
        self._logs_timer = None
        transitions = self.controller.transitions
        live = list(transitions.live.values())
        capped = [(each.attempt.log, each.job.spec.log_cap_mb) for each in live if each.attempt.log]
        capped += transitions.ended_logs
        transitions.ended_logs.clear()
        self._loop.run_in_executor(None, _trim, capped)
        if live:
            self._logs_timer = self._loop.call_later(_LOGS_EVERY_S, self._trim_logs)


def _trim(capped: list[tuple[str, float]]) -> None:
    for log, cap_mb in capped:
        try:
            rotate_if_over(Path(log), int(cap_mb * 1048576))
        except OSError as error:
            _log.warning("the log %s cannot be shortened: %s", log, error.strerror)


def read_rules() -> Rules:
    """What the configuration says now."""
    config = load_config()
    queue, packing = config.queue, config.packing
    return Rules(
        limits=SchedulingLimits(cpu_jobs=queue.cpu_jobs or os.cpu_count() or 1, tags=dict(queue.tags)),
        max_cpu_percent=queue.max_cpu_percent,
        min_free_memory_mb=queue.min_free_memory_mb or None,
        packing=Packing(
            max_jobs_per_device=packing.max_jobs_per_device,
            max_load_percent=packing.max_load_percent or None,
            max_foreign_load_percent=queue.max_foreign_load_percent,
        ),
        first_run_part=packing.first_run_part,
        settle_s=packing.settle_s or None,
        ram_reserve_mb=config.suspend.ram_reserve_mb,
        engine=queue.engine,
        shows_uuids=config.devices.shows_uuids,
    )


def banned_devices(snapshot: Snapshot) -> tuple[str, ...]:
    devices = load_config().devices
    return banned_ids(devices.banned, devices.banned_names, snapshot)
