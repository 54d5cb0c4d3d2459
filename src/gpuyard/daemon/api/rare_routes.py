"""Routes that the start of the daemon and the usual commands do not need, with their handlers.

Importing this module takes a fifth of what the daemon imports at its start. `Routes` imports it in a thread after the
start, or when one of these routes is first requested.
"""

from functools import partial
from pathlib import Path

from gpuyard.connect import paths
from gpuyard.daemon.api.batches import batch_runs, batch_status, task_list
from gpuyard.daemon.api.edit import EditHandler
from gpuyard.daemon.api.job_logs import JobLogs
from gpuyard.daemon.api.jobs import JobHandler
from gpuyard.daemon.api.learned_estimates import (
    estimate_list,
    export_estimates,
    forget_estimates,
    import_estimates,
)
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.submit import SubmissionHandler
from gpuyard.daemon.api.summary import SummaryHandler
from gpuyard.daemon.api.usage_report import ReportHandler
from gpuyard.daemon.api.wait_routes import WaitHandler
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.timeline import Timeline
from gpuyard.daemon.server.connection import Handler
from gpuyard.daemon.server.router import Route, RouteKey
from gpuyard.daemon.web.open_page import PageListener


class RareRoutes:
    def __init__(
        self,
        scheduler: SchedulerLoop,
        handle: Handler,
        reader: ThreadedReader,
        jobs: JobHandler,
        submissions: SubmissionHandler,
    ) -> None:
        """`handle` answers the requests of the page."""
        self.web = web = PageListener(handle, Path(paths.state_folder()))
        self._reports = ReportHandler(scheduler)
        logs, waits = JobLogs(scheduler), WaitHandler(scheduler, reader)
        self.table: dict[RouteKey, Route] = {
            ("GET", "/wait"): waits.wait,
            ("POST", "/wait/reported"): waits.mark_reported,
            ("GET", "/jobs/{id}/log"): logs.tail,
            ("GET", "/jobs/{id}/log/live"): logs.live,
            ("POST", "/jobs/edit"): EditHandler(scheduler, jobs, submissions).edit,
            ("GET", "/batches/{id}"): partial(batch_status, scheduler),
            ("GET", "/batches/{id}/runs"): partial(batch_runs, scheduler),
            ("GET", "/tasks"): partial(task_list, scheduler),
            ("GET", "/estimates"): partial(estimate_list, scheduler),
            ("GET", "/estimates/export"): partial(export_estimates, scheduler),
            ("POST", "/estimates/import"): partial(import_estimates, scheduler),
            ("POST", "/estimates/forget"): partial(forget_estimates, scheduler),
            ("GET", "/timeline"): Timeline(scheduler, reader).timeline,
            ("GET", "/report"): self._reports.report,
            ("GET", "/summary"): SummaryHandler(scheduler, reader, submissions.snapshots.unbrought).summary,
            ("GET", "/web"): web.state,
            ("POST", "/web"): web.open,
            ("POST", "/web/stop"): web.stop,
        }

    def close(self) -> None:
        self.web.close()
        self._reports.close()
