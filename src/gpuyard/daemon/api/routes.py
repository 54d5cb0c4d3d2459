"""The daemon's routes, as the command line, the web page and scripts use them.

All are below `/v1`, where keys and routes are only ever added, except `/metrics` and `/openapi.json`, which are where
tools expect them. `gpuyard.schema.operations` describes each.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from msgspec.structs import asdict

from gpuyard.connect import paths
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import parse_duration
from gpuyard.daemon.api.batch_status import batch_runs, batch_status
from gpuyard.daemon.api.change_jobs import ChangeHandler
from gpuyard.daemon.api.codec import decode_body, decode_query, encode
from gpuyard.daemon.api.export_jobs import export_page
from gpuyard.daemon.api.job_logs import JobLogs
from gpuyard.daemon.api.list_jobs import MOST_ROWS, JobListHandler
from gpuyard.daemon.api.memory_estimates import estimate_list, forget_estimates
from gpuyard.daemon.api.queue_status import count_under_way, queue_state
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.api.shutdown import Shutdown, read_shutdown
from gpuyard.daemon.api.submit import SubmissionHandler
from gpuyard.daemon.api.usage_report import ReportHandler
from gpuyard.daemon.api.workspace_status import task_list
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.metrics.collect import Metrics
from gpuyard.daemon.monitor.device_history import UsageHistory
from gpuyard.daemon.monitor.device_list import DeviceList
from gpuyard.daemon.monitor.timeline import Timeline
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.daemon.server.connection import HttpAnswer
from gpuyard.daemon.server.event_stream import EventStreams
from gpuyard.daemon.server.http_parser import Request, Response, ResponseStream
from gpuyard.daemon.server.router import RouteAnswer, Router
from gpuyard.daemon.server.router import Routes as Table
from gpuyard.daemon.web.open_page import PageListener
from gpuyard.engines.common.job_logs import path_of, remove_logs
from gpuyard.engines.registry import log_folders
from gpuyard.errors import EnvironmentFault, StoreFault, UserError
from gpuyard.schema.batches import BatchRunPage
from gpuyard.schema.jobs import ExportPage
from gpuyard.schema.queue import CleanResult, DaemonStatus, PauseResult, StopResult, TagState
from gpuyard.schema.requests import (
    CleanRequest,
    EstimatesQuery,
    ExportQuery,
    ForgetRequest,
    RunsQuery,
    TagQuery,
    TagRequest,
)
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.version import API, __version__


class Routes:
    def __init__(
        self, scheduler: SchedulerLoop, stop: Callable[[Shutdown], None], started_at: float, *, is_managed: bool = False
    ) -> None:
        """`is_managed`: the daemon runs in the foreground, under a service manager or in a terminal."""
        self._scheduler = scheduler
        self._stop = stop
        self._started_at = started_at
        self._is_managed = is_managed
        self.events = EventStreams(scheduler, self.handle)
        self.web = PageListener(self.handle, Path(paths.state_folder()))
        self._reader, self._reporting = ThreadedReader(scheduler.database.path), ReportHandler(scheduler)
        reader, devices = self._reader, DeviceList(scheduler)
        under_api: Table = {
            **JobListHandler(scheduler, reader).routes(),
            **ChangeHandler(scheduler, reader).routes(),
            **SubmissionHandler(scheduler).routes(),
            **JobLogs(scheduler).routes(),
            **devices.routes(),
            **UsageHistory(scheduler, devices).routes(),
            **Timeline(scheduler, reader).routes(),
            **self._reporting.routes(),
            **self._queue_routes(),
            **self.web.routes(),
            ("GET", "/status"): self._status,
            ("GET", "/events"): self.events.stream,
            ("GET", "/batches/{id}"): lambda _, first_id: batch_status(scheduler, first_id),
            ("GET", "/batches/{id}/runs"): self._runs,
            ("GET", "/tasks"): lambda request: task_list(scheduler, decode_query(request, TagQuery).tag),
            ("GET", "/exports"): self._export,
            ("GET", "/estimates"): lambda request: estimate_list(
                scheduler, min(decode_query(request, EstimatesQuery).limit, MOST_ROWS)
            ),
            ("POST", "/estimates/forget"): lambda request: forget_estimates(
                scheduler, decode_body(request, ForgetRequest)
            ),
        }
        self.table: Table = {
            **{(method, API + path): route for (method, path), route in under_api.items()},
            ("GET", "/openapi.json"): lambda _: _describe(),
            **Metrics(scheduler, devices, started_at).routes(),
        }
        self._router = Router(self.table)

    def close(self) -> None:
        """Close the page and the connections that only read; the database itself stays open."""
        self.web.close()
        self._reader.close()
        self._reporting.close()

    def _queue_routes(self) -> Table:
        return {
            ("POST", "/pause"): lambda _: self._pause(paused=True),
            ("POST", "/unpause"): lambda _: self._pause(paused=False),
            ("POST", "/drain"): lambda _: self._pause(paused=True, draining=True),
            ("POST", "/clean"): self._clean,
            ("POST", "/stop"): self._shut_down,
            ("POST", "/tags/stop"): lambda request: self._set_tag_stopped(request, stopped=True),
            ("POST", "/tags/go"): lambda request: self._set_tag_stopped(request, stopped=False),
        }

    def handle(self, request: Request) -> HttpAnswer | Awaitable[HttpAnswer]:
        with self._failing_on_damage():
            answer = self._router.find(request)()
        return self._respond_later(answer) if isinstance(answer, Awaitable) else _respond(answer)

    async def _respond_later(self, answer: Awaitable[RouteAnswer]) -> HttpAnswer:
        with self._failing_on_damage():
            return _respond(await answer)

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

    # The queue as a whole

    def _status(self, _: Request) -> DaemonStatus:
        scheduler = self._scheduler
        return DaemonStatus(
            **asdict(queue_state(scheduler)),
            pid=os.getpid(),
            version=__version__,
            managed=self._is_managed,
            started_at=iso_time(self._started_at),
            uptime_s=time.time() - self._started_at,
            socket=paths.socket_path(),
            state_dir=paths.state_folder(),
            under_way=count_under_way(scheduler),
            viewers=self.events.viewers,
            step_us=None if scheduler.step_s is None else scheduler.step_s * 1e6,
            notices=[*scheduler.notices, *([scheduler.problem] if scheduler.problem else [])],
        )

    def _pause(self, *, paused: bool, draining: bool = False) -> PauseResult:
        self._scheduler.requests.set_paused(paused=paused, draining=draining)
        self._scheduler.wake()
        return PauseResult(**asdict(queue_state(self._scheduler)), running=count_under_way(self._scheduler))

    def _set_tag_stopped(self, request: Request, *, stopped: bool) -> TagState:
        tag = decode_body(request, TagRequest).tag
        self._scheduler.requests.set_stopped(tag, stopped=stopped)
        self._scheduler.wake()
        return TagState(tag=tag, stopped=stopped)

    def _shut_down(self, request: Request) -> StopResult:
        asyncio.get_running_loop().call_soon(self._stop, read_shutdown(request))
        return StopResult(stopping=True, running=count_under_way(self._scheduler))

    async def _clean(self, request: Request) -> CleanResult:
        removed = await run_in_pieces(self._scheduler.requests.clean(_read_age(request)))
        folders = log_folders(Path(paths.state_folder()))
        freed = await asyncio.get_running_loop().run_in_executor(None, _remove_logs, folders, removed)
        return CleanResult(jobs=len(removed), bytes=freed)

    def _export(self, request: Request) -> ExportPage:
        query = decode_query(request, ExportQuery)
        return export_page(self._scheduler, query.ids, query.after)

    def _runs(self, request: Request, first_id: int) -> BatchRunPage:
        query = decode_query(request, RunsQuery)
        return batch_runs(self._scheduler, first_id, query.after, max(1, min(query.limit, MOST_ROWS)))


def _respond(answer: RouteAnswer) -> HttpAnswer:
    return answer if isinstance(answer, Response | ResponseStream) else Response(body=encode(answer))


def _describe() -> Response:
    from gpuyard.schema.openapi import document  # rarely requested, and slow to import

    return Response(body=document())


def _read_age(request: Request) -> float:
    age = decode_body(request, CleanRequest).older_than_s
    seconds = parse_duration(age) if isinstance(age, str) else age
    if seconds < 0:
        raise UserError(f"older_than_s: {seconds:g} is negative", hint="send seconds, or a time such as 30d")
    return seconds


def _remove_logs(folders: list[Path], removed: list[tuple[int, int]]) -> int:
    freed = 0
    for folder, (job_id, attempts) in itertools.product(folders, removed):
        for attempt in range(1, attempts + 1):
            path = path_of(folder, job_id, attempt)
            try:
                freed += path.stat().st_size
                remove_logs(folder, job_id, attempt)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EnvironmentFault(f"{path} cannot be removed: {error.strerror}") from error
    return freed
