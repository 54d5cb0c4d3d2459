"""The daemon's routes: what can be asked over its sockets, by the command line, by a page, by `curl`.

All are under `/v1`, where keys and routes are only ever added, but for `/metrics` and `/openapi.json`, which have their
places by convention. Each is described in `operations`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from gpuyard.connect import paths
from gpuyard.connect.fast_http import API
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.api import batch_status, export_jobs, memory_estimates, workspace_status
from gpuyard.daemon.api.change_jobs import ChangeHandler
from gpuyard.daemon.api.job_logs import JobLogs
from gpuyard.daemon.api.list_jobs import MOST_ROWS, JobListHandler
from gpuyard.daemon.api.parameters import read_age, read_body, read_tag, read_whole, read_words
from gpuyard.daemon.api.queue_status import standing, under_way
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.api.shutdown import Shutdown, read_ending
from gpuyard.daemon.api.submit import SubmissionHandler
from gpuyard.daemon.api.usage_report import ReportHandler
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.metrics.collect import Metrics
from gpuyard.daemon.monitor.device_history import UsageHistory
from gpuyard.daemon.monitor.device_list import DeviceList
from gpuyard.daemon.monitor.timeline import Timeline
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.daemon.server.connection import HttpAnswer
from gpuyard.daemon.server.event_stream import EventStreams

# FIX
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.daemon.server.router import Answer, RouteAnswer, Router
from gpuyard.daemon.server.router import Routes as Table
from gpuyard.daemon.web.open_page import PageListener
from gpuyard.engines.local.job_logs import path_of, remove_logs
from gpuyard.engines.registry import log_folders
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.version import __version__


class Routes:
    def __init__(
        self, scheduler: SchedulerLoop, stop: Callable[[Shutdown], None], started_at: float, *, is_managed: bool = False
    ) -> None:
        """`is_managed`: it runs in the foreground, for a service manager or a person who looks after it."""
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
            **self._of_the_whole(),
            **self.web.routes(),
            ("GET", "/status"): self._status,
            ("GET", "/events"): self.events.stream,
            ("GET", "/batches/{id}"): lambda _, first_id: batch_status.standing(scheduler, first_id),
            ("GET", "/batches/{id}/runs"): self._runs,
            ("GET", "/tasks"): lambda asked: workspace_status.standing(scheduler, read_tag(asked.query)),
            ("GET", "/exports"): lambda asked: export_jobs.page(
                scheduler, asked.query.get("ids", ""), after=read_whole(asked.query.get("after"), 0)
            ),
            ("GET", "/estimates"): self._estimates,
            ("POST", "/estimates/forget"): lambda asked: memory_estimates.forget(
                scheduler, read_words(read_body(asked))
            ),
        }
        self.table: Table = {
            **{(method, API + path): route for (method, path), route in under_api.items()},
            ("GET", "/openapi.json"): lambda _: _description(),
            **Metrics(scheduler, devices, started_at).routes(),
        }
        self._router = Router(self.table)

    def close(self) -> None:
        """Close the page and the connections that only read; the database itself stays open."""
        self.web.close()
        self._reader.close()
        self._reporting.close()

    def _of_the_whole(self) -> Table:
        return {
            ("POST", "/pause"): lambda _: self._pause(paused=True),
            ("POST", "/unpause"): lambda _: self._pause(paused=False),
            ("POST", "/drain"): lambda _: self._pause(paused=True, draining=True),
            ("POST", "/clean"): self._clean,
            ("POST", "/stop"): self._end,
            ("POST", "/tags/stop"): lambda asked: self._stop_tag(read_tag(read_body(asked)), stopped=True),
            ("POST", "/tags/go"): lambda asked: self._stop_tag(read_tag(read_body(asked)), stopped=False),
        }

    def handle(self, request: Request) -> HttpAnswer | Awaitable[HttpAnswer]:
        with self._damage_noticed():
            told = self._router.find(request)()
        return _as_answer(told) if not isinstance(told, Awaitable) else self._later(told)

    async def _later(self, told: Awaitable[RouteAnswer]) -> HttpAnswer:
        with self._damage_noticed():
            return _as_answer(await told)

    @contextlib.contextmanager
    def _damage_noticed(self) -> Iterator[None]:
        """A damaged database ends the daemon wherever it shows first."""
        try:
            with convert_sqlite_errors():
                yield
        except StoreFault as error:
            if error.is_damage:
                self._scheduler.fail(error)
            raise

    # The queue as a whole

    def _status(self, _: Request) -> Answer:
        scheduler = self._scheduler
        return {
            "pid": os.getpid(),
            "version": __version__,
            "managed": self._is_managed,
            "started_at": iso_time(self._started_at),
            "uptime_s": time.time() - self._started_at,
            "socket": paths.socket_path(),
            "state_dir": paths.state_folder(),
            **standing(scheduler),
            "under_way": under_way(scheduler),
            "viewers": self.events.viewers,
            "step_us": None if scheduler.step_s is None else scheduler.step_s * 1e6,
            "notices": [*scheduler.notices, *([scheduler.problem] if scheduler.problem else [])],
        }

    def _pause(self, *, paused: bool, draining: bool = False) -> Answer:
        self._scheduler.requests.set_paused(paused=paused, draining=draining)
        self._scheduler.wake()
        return {**standing(self._scheduler), "running": under_way(self._scheduler)}

    def _stop_tag(self, tag: str, *, stopped: bool) -> Answer:
        self._scheduler.requests.set_stopped(tag, stopped=stopped)
        self._scheduler.wake()
        return {"tag": tag, "stopped": stopped}

    def _end(self, request: Request) -> Answer:
        asyncio.get_running_loop().call_soon(self._stop, read_ending(request))
        return {"stopping": True, "running": under_way(self._scheduler)}

    async def _clean(self, request: Request) -> Answer:
        gone = await run_in_pieces(self._scheduler.requests.clean(read_age(read_body(request))))
        folders = log_folders(Path(paths.state_folder()))
        freed = await asyncio.get_running_loop().run_in_executor(None, _remove_logs, folders, gone)
        return {"jobs": len(gone), "bytes": freed}

    def _estimates(self, request: Request) -> Answer:
        return memory_estimates.estimates(self._scheduler, min(read_whole(request.query.get("limit"), 50), MOST_ROWS))

    def _runs(self, request: Request, first_id: int) -> Answer:
        return batch_status.runs(
            self._scheduler,
            first_id,
            after=read_whole(request.query.get("after"), 0),
            limit=max(1, min(read_whole(request.query.get("limit"), 1000), MOST_ROWS)),
        )


def _description() -> Response:
    from gpuyard.daemon.schema.openapi import document  # few ask for it, and it is large

    return Response(body=document())


def _as_answer(told: RouteAnswer) -> HttpAnswer:
    return Response(body=json.dumps(told).encode()) if isinstance(told, dict) else told


def _remove_logs(folders: list[Path], gone: list[tuple[int, int]]) -> int:
    freed = 0
    for folder, (job_id, attempts) in itertools.product(folders, gone):
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
