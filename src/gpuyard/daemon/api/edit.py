"""The route that edits waiting jobs: it gives them other options."""

import asyncio
import contextlib

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.control.edit_jobs import JobEditor
from gpuyard.control.fit_to_machine import fit_to_machine
from gpuyard.core.job.job_spec import JobSpec
from gpuyard.core.job.resubmit import edited
from gpuyard.core.job.secret_variables import secret_variables
from gpuyard.core.job.submission import Submission
from gpuyard.core.scheduling.host_capacity import check_host
from gpuyard.core.snapshot import Snapshot
from gpuyard.daemon.api.jobs import JobHandler
from gpuyard.daemon.api.submit import SubmissionHandler, with_container_tool
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.cluster.check_submission import terms_of
from gpuyard.engines.registry import LOCAL, check_name
from gpuyard.errors import UserError
from gpuyard.schema.queue import ChangeSummary
from gpuyard.schema.requests import EditRequest
from gpuyard.store.job_edits import JobEdits


class EditHandler:
    def __init__(self, scheduler: SchedulerLoop, jobs: JobHandler, submissions: SubmissionHandler) -> None:
        self._scheduler, self._jobs, self._submissions = scheduler, jobs, submissions

    async def edit(self, body: EditRequest) -> ChangeSummary:
        snapshot = await self._submissions.read_devices()
        scheduler = self._scheduler
        edits = JobEdits(scheduler.database, scheduler.store)
        await self._check_clusters(body, edits)
        editor = JobEditor(
            scheduler.controller.transitions,
            edits,
            scheduler.clock,
            body.options,
            lambda submission: self._fit(submission, snapshot),
        )
        result = await self._jobs.change(editor.edit, body, takes_back=True)
        await scheduler.checkpoints.may_write()
        with scheduler.store.transaction():
            editor.finish()
        return result

    async def _check_clusters(self, body: EditRequest, edits: JobEdits) -> None:
        """Raise UserError, before any job is changed, if no node of its cluster could ever take one of the jobs then.
        An option that is wrong is left to the editor."""
        new_specs = list[JobSpec]()
        for selection in await self._jobs.selection.pieces(body):
            for job in edits.one_of_each_spec(selection.ranges):
                with contextlib.suppress(UserError):
                    spec = edited(job, body.options).spec
                    check_name(spec.engine or LOCAL)
                    if spec.engine and (spec.engine, terms_of(spec)) != (job.spec.engine, terms_of(job.spec)):
                        new_specs.append(spec)
        for spec in new_specs:
            await asyncio.get_running_loop().run_in_executor(None, self._submissions.cluster_check.check, spec)

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
