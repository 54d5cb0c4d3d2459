"""The route that edits waiting jobs: it gives them other options."""

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.control.edit_jobs import JobEditor
from gpuyard.control.user_requests import fit_to_machine
from gpuyard.core.job.secret_variables import secret_variables
from gpuyard.core.job.submission import Submission
from gpuyard.core.scheduling.host_capacity import check_host
from gpuyard.core.snapshot import Snapshot
from gpuyard.daemon.api.jobs import JobHandler
from gpuyard.daemon.api.submit import SubmissionHandler, with_container_tool
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.registry import LOCAL, check_name
from gpuyard.schema.queue import ChangeSummary
from gpuyard.schema.requests import EditRequest
from gpuyard.store.job_edits import JobEdits


class EditHandler:
    def __init__(self, scheduler: SchedulerLoop, jobs: JobHandler, submissions: SubmissionHandler) -> None:
        self._scheduler, self._jobs, self._submissions = scheduler, jobs, submissions

    async def edit(self, body: EditRequest) -> ChangeSummary:
        snapshot = await self._submissions.read_devices()
        scheduler = self._scheduler
        editor = JobEditor(
            scheduler.controller.transitions,
            JobEdits(scheduler.database, scheduler.store),
            scheduler.clock,
            body.options,
            lambda submission: self._fit(submission, snapshot),
        )
        result = await self._jobs.change(editor.edit, body, takes_back=True)
        await scheduler.checkpoints.may_write()
        with scheduler.store.transaction():
            editor.finish()
        return result

    def _fit(self, submission: Submission, snapshot: Snapshot) -> Submission:
        """Fit an edited job to this machine, as a submission. UserError if it could never run."""
        check_name(submission.spec.engine or LOCAL)
        submission = with_container_tool(submission)
        config = load_config()
        if submission.spec.need.host is not None and not submission.spec.engine:
            check_host(submission.spec.need, snapshot.host, config.host.limits)
        if submission.spec.need.devices:
            devices = config.devices
            submission = fit_to_machine(submission, snapshot, devices.banned_ids(snapshot), devices.vendor)
        spec = submission.spec
        names = secret_variables(spec.environment, self._scheduler.controller.rules.secret_names)
        return replace(submission, spec=replace(spec, secrets=names))
