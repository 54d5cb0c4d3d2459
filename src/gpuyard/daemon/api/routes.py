"""The daemon's routes, as the command line, the web page and scripts use them.

All are below `/v1`, where keys and routes are only ever added, except `/metrics` and `/openapi.json`, which are where
tools expect them. `gpuyard.schema.operations` describes each: requests are decoded by it. Handlers that few requests
need are imported with the first of these.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.client import paths
from gpuyard.daemon.api.codec import decode, decode_body, encode, wall_time
from gpuyard.daemon.api.jobs import JobHandler, queue_state
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.submit import EditHandler, SubmissionHandler
from gpuyard.daemon.api.wait import WaitHandler
from gpuyard.daemon.job_code import CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.metrics import Metrics
from gpuyard.daemon.monitor.devices import DeviceList
from gpuyard.daemon.monitor.job_progress_watch import ProgressWatch
from gpuyard.daemon.monitor.usage_history import UsageHistory
from gpuyard.daemon.retention import Retention
from gpuyard.daemon.server.connection import HttpAnswer
from gpuyard.daemon.server.event_stream import EventStreams
from gpuyard.daemon.server.http_messages import EVENTS, HttpError, Request, Response, Route, RouteKey, Router
from gpuyard.engines.open_cluster_engine import log_folders
from gpuyard.errors import StoreFault, UserError
from gpuyard.model.job import SuspendedBy
from gpuyard.model.lifecycle import JobState
from gpuyard.model.units import parse_duration
from gpuyard.schema.operations import OPERATIONS, document
from gpuyard.schema.queue import CleanResult, DaemonStatus, PauseResult, StopResult, TagState
from gpuyard.schema.requests import CleanRequest, StopRequest, TagRequest
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.version import API, __version__

if TYPE_CHECKING:
    from gpuyard.daemon.api.learned_estimates import EstimateHandler
    from gpuyard.daemon.api.logs import JobLogs
    from gpuyard.daemon.api.reports import Reports, Timeline
    from gpuyard.daemon.web.open_page import PageListener

# EX_TEMPFAIL of sysexits.h: not 0, so that a unit with `Restart=on-failure` is started again.
RESTART_STATUS = 75
# Routes that read the request themselves.
_UNDECODED = {("POST", f"{API}/submissions"), ("POST", f"{API}/submissions/preview"), ("GET", f"{API}{EVENTS}")}
# Requests that change no job that waits: slices go on meanwhile.
_LEAVE_SLICES = {
    "/submissions", "/submissions/preview", "/jobs/{id}/resubmit", "/wait/reported", "/web", "/web/stop",
}  # fmt: skip


class Routes:
    def __init__(
        self,
        scheduler: SchedulerLoop,
        stop: Callable[[StopRequest], None],
        started_at: float,
        *,
        is_managed: bool = False,
    ) -> None:
        """`started_at`: when the daemon started, in queue time. `is_managed`: it runs in the foreground, under a
        service manager or in a terminal."""
        self._scheduler, self._stop = scheduler, stop
        self._started_at, self._is_managed = started_at, is_managed
        self._folder = folder = Path(paths.state_folder())
        self.events = EventStreams(scheduler, self.handle)
        self.retention = Retention(scheduler, folder)
        self.progress = ProgressWatch(scheduler, log_folders(folder))
        self._code = CodeWatch(scheduler)
        self._reader = ThreadedReader(scheduler.database.path)
        self._devices = DeviceList(scheduler)
        self._usage = UsageHistory(scheduler, self._devices, folder)
        self.health = self._devices.health
        self.table: dict[RouteKey, Route] = {
            (method, API + path): route for (method, path), route in (self._routes() | self._job_routes()).items()
        }
        self.table["GET", "/openapi.json"] = lambda: Response(body=document())
        self.table["GET", "/metrics"] = Metrics(scheduler, self._devices, started_at).metrics
        self._router = Router(key for key, each in OPERATIONS.items() if not each.is_of_page)

    def _job_routes(self) -> dict[RouteKey, Route]:
        scheduler, requests, late = self._scheduler, self._scheduler.requests, self._late
        self._jobs = jobs = JobHandler(scheduler, self._reader, self._code)
        submissions = SubmissionHandler(scheduler, self._code, self.retention.snapshots)
        return {
            ("GET", "/jobs"): jobs.page,
            ("GET", "/sweeps/{id}"): late("_jobs.folded.table"),
            ("GET", "/exports"): jobs.export,
            ("GET", "/jobs/{id}"): jobs.show,
            ("GET", "/jobs/{id}/why"): jobs.why,
            ("GET", "/jobs/{id}/world"): jobs.world,
            ("GET", "/jobs/{id}/history"): jobs.history,
            ("POST", "/submissions"): submissions.submit,
            ("POST", "/submissions/preview"): submissions.preview,
            ("POST", "/jobs/{id}/resubmit"): submissions.resubmit,
            ("POST", "/jobs/cancel"): partial(jobs.change, requests.cancel),
            ("POST", "/jobs/hold"): partial(jobs.change, requests.hold, takes_back=True),
            ("POST", "/jobs/release"): partial(jobs.change, requests.release),
            ("POST", "/jobs/retry"): jobs.retry,
            ("POST", "/jobs/suspend"): jobs.suspend,
            ("POST", "/jobs/resume"): partial(jobs.change, requests.resume),
            ("POST", "/jobs/priority"): jobs.prioritise,
            ("POST", "/jobs/edit"): EditHandler(scheduler, jobs, submissions).edit,
            ("GET", "/jobs/{id}/log"): late("_logs.tail"),
            ("GET", "/jobs/{id}/log/live"): late("_logs.live"),
            ("GET", "/batches/{id}"): late("_jobs.folded.batch"),
            ("GET", "/batches/{id}/runs"): late("_jobs.folded.batch_runs"),
            ("GET", "/tasks"): late("_jobs.folded.tasks"),
            ("GET", "/estimates"): late("_estimates.rows"),
            ("GET", "/estimates/export"): late("_estimates.export"),
            ("POST", "/estimates/import"): late("_estimates.import_all"),
            ("POST", "/estimates/forget"): late("_estimates.forget"),
        }

    def _routes(self) -> dict[RouteKey, Route]:
        waits, devices, late = WaitHandler(self._scheduler, self._reader), self._devices, self._late
        return {
            ("GET", "/status"): self._status,
            ("GET", EVENTS): self.events.stream,
            ("GET", "/wait"): waits.wait,
            ("POST", "/wait/reported"): waits.mark_reported,
            ("POST", "/pause"): partial(self._pause, paused=True),
            ("POST", "/unpause"): partial(self._pause, paused=False),
            ("POST", "/drain"): partial(self._pause, paused=True, draining=True),
            ("POST", "/clean"): self._clean,
            ("POST", "/stop"): self._shut_down,
            ("POST", "/tags/stop"): partial(self._set_tag_stopped, stopped=True),
            ("POST", "/tags/go"): partial(self._set_tag_stopped, stopped=False),
            ("GET", "/web"): late("web.state"),
            ("POST", "/web"): late("web.open"),
            ("POST", "/web/stop"): late("web.stop"),
            ("GET", "/devices"): devices.devices,
            ("POST", "/devices/drain"): devices.drain,
            ("POST", "/devices/undrain"): devices.undrain,
            ("POST", "/devices/clear"): devices.clear,
            ("GET", "/devices/history"): self._usage.history,
            ("GET", "/timeline"): late("_timeline.timeline"),
            ("GET", "/report"): late("_reports.report"),
            ("GET", "/summary"): late("_reports.summary"),
        }

    def _late(self, route: str) -> Route:
        """Return a route of a handler that is made with the first request."""

        def answer(*given: object) -> Any:
            return attrgetter(route)(self)(*given)

        return answer

    @cached_property
    def web(self) -> "PageListener":
        from gpuyard.daemon.web.open_page import PageListener

        return PageListener(self.handle, self._folder)

    @cached_property
    def _estimates(self) -> "EstimateHandler":
        from gpuyard.daemon.api.learned_estimates import EstimateHandler

        return EstimateHandler(self._scheduler)

    @cached_property
    def _logs(self) -> "JobLogs":
        from gpuyard.daemon.api.logs import JobLogs

        return JobLogs(self._scheduler)

    @cached_property
    def _reports(self) -> "Reports":
        from gpuyard.daemon.api.reports import Reports

        return Reports(self._scheduler, self.retention.snapshots.unbrought)

    @cached_property
    def _timeline(self) -> "Timeline":
        from gpuyard.daemon.api.reports import Timeline

        return Timeline(self._scheduler, self._reader)

    def close(self) -> None:
        """Close the page and the connections that only read; the database itself stays open."""
        made = vars(self)
        closed = [made[name] for name in ("web", "_reports") if name in made]
        for each in (*closed, self._reader, self.retention, self._usage, self._code):
            each.close()

    async def handle(self, request: Request) -> HttpAnswer:
        """Answer a request; once more, if a row of the database could not be read and is set aside now."""
        try:
            return await self._answer(request)
        except Exception as error:
            await self._scheduler.checkpoints.may_write()
            if not self._scheduler.set_rows_aside(error):
                raise
        self._scheduler.wake()
        return await self._answer(request)

    async def _answer(self, request: Request) -> HttpAnswer:
        scheduler = self._scheduler
        with contextlib.ExitStack() as until_answered:
            until_answered.enter_context(self._failing_on_damage())
            key, numbers = self._router.find(request)
            operation, given = OPERATIONS[key], list[Struct]()
            if key in _UNDECODED:
                given.append(request)
            elif operation.query is not None:
                given.append(decode(request.query, operation.query, "query"))
            elif operation.body is not None:
                given.append(decode_body(request.body, operation.body))
            is_post = key[0] != "GET"
            if is_post and key[1].removeprefix(API) not in _LEAVE_SLICES:
                until_answered.enter_context(scheduler.during_change())
                await scheduler.settle_slices()
            if is_post:
                await scheduler.checkpoints.may_write()
            answer = self.table[key](*numbers, *given)
            if isinstance(answer, Awaitable):
                answer = await answer
            if is_post:
                await scheduler.checkpoints.synced()
            return answer if isinstance(answer, HttpAnswer) else Response(body=encode(answer))

    @contextlib.contextmanager
    def _failing_on_damage(self) -> Iterator[None]:
        """Stop the daemon if a request finds the database damaged."""
        try:
            with convert_sqlite_errors():
                yield
        except StoreFault as error:
            if error.is_damage:
                self._scheduler.fail(error)
            raise

    def _status(self) -> DaemonStatus:
        scheduler = self._scheduler
        return DaemonStatus(
            **asdict(queue_state(scheduler)),
            pid=os.getpid(),
            version=__version__,
            managed=self._is_managed,
            started_at=wall_time(scheduler, self._started_at),
            uptime_s=scheduler.clock.now() - self._started_at,
            socket=paths.socket_path(),
            state_dir=paths.state_folder(),
            under_way=self._count_under_way(),
            viewers=len(self.events.viewers),
            step_us=None if scheduler.step_s is None else scheduler.step_s * 1e6,
            kept=self.retention.kept_files(),
        )

    async def _pause(self, *, paused: bool, draining: bool = False) -> PauseResult:
        self._scheduler.requests.set_paused(paused=paused, draining=draining)
        self._scheduler.wake()
        if paused:
            waiting = self._scheduler.controller.cluster_dispatch.waiting_there()
            await self._scheduler.take_back({each.job.id for each in waiting})
        return PauseResult(**asdict(queue_state(self._scheduler)), running=self._count_under_way())

    def _set_tag_stopped(self, body: TagRequest, *, stopped: bool) -> TagState:
        self._scheduler.requests.set_stopped(body.tag, stopped=stopped)
        self._scheduler.wake()
        return TagState(tag=body.tag, stopped=stopped)

    def _shut_down(self, body: StopRequest) -> StopResult:
        """Stop the daemon. Refuse it if the request names the pid of another daemon."""
        if body.pid is not None and body.pid != os.getpid():
            message = f"this daemon is process {os.getpid()}, not {body.pid}"
            raise HttpError(409, message, hint="it was restarted meanwhile")
        asyncio.get_running_loop().call_soon(self._stop, body)
        return StopResult(stopping=True, running=self._count_under_way())

    async def _clean(self, body: CleanRequest) -> CleanResult:
        age = body.older_than_s
        seconds = parse_duration(age) if isinstance(age, str) else age
        if seconds is not None and seconds < 0:
            raise UserError(f"older_than_s: {seconds:g} is negative", hint="send seconds, or a time such as 30d")
        return await self.retention.apply(seconds, is_urgent=True)

    def _count_under_way(self) -> int:
        """Return the number of jobs that have begun and will end without a user's help: not those that a user
        suspended."""
        return sum(
            each.job.state is not JobState.PENDING
            and (each.job.state is not JobState.SUSPENDED or each.attempt.parked is not SuspendedBy.BY_PERSON)
            for each in self._scheduler.controller.transitions.live.values()
        )
