"""Routes that submit jobs, and that give waiting jobs other options. A submission with a token is stored once, however
often it is sent.
"""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import convert
from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.daemon.api.codec import decode_body
from gpuyard.daemon.api.jobs import JobHandler, find_job
from gpuyard.daemon.api.slow_requests import call_after_answer, run_in_pieces
from gpuyard.daemon.job_code import CodeSnapshots, CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import Request
from gpuyard.engines.containers import choose_tool, has_podman_init
from gpuyard.engines.open_cluster_engine import LOCAL, check_name, site_to_ask
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger.neighbours import due_note
from gpuyard.model.container import bare_container_tool
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.model.placeholders import fill_in
from gpuyard.model.resubmit import edited, resubmission
from gpuyard.model.shell_environment import ShellSettings, secret_variables, unattainable
from gpuyard.model.submission import Submission, parse_submission
from gpuyard.model.subscriptions import is_url
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.device_names import silent_probe
from gpuyard.policy.host_room import check_host
from gpuyard.policy.machine import check_suitable
from gpuyard.policy.wait_reasons import REMEDIES, Reason
from gpuyard.probes.kernel_files import vendors_on_pci
from gpuyard.queue.add_submission import read_start_time
from gpuyard.queue.edit_jobs import JobEditor, fit_to_machine
from gpuyard.schema.queue import ChangeSummary, PreviewedJob, SubmissionPreview, SubmitResult
from gpuyard.schema.requests import EditRequest, ResubmitBody, SubmissionBody
from gpuyard.store.queue_queries import JobEdits
from gpuyard.system.processes import user_name
from gpuyard.system.submitting_shell import hard_limits, read_shell_settings

if TYPE_CHECKING:
    from gpuyard.engines.cluster.site_checks import SubmissionCheck

_SAMPLE_FOR_SUBMIT_S = 10.0


class SubmissionHandler:
    def __init__(self, scheduler: SchedulerLoop, code: CodeWatch, snapshots: CodeSnapshots) -> None:
        self._scheduler = scheduler
        self._code, self.snapshots = code, snapshots
        self._user = user_name(os.getuid())
        self._first_reading_by = time.monotonic() + 5.0
        self._shell, self._hard_limits = convert(read_shell_settings(), ShellSettings), hard_limits()
        self._arriving: dict[str, asyncio.Task[SubmitResult]] = {}

    @cached_property
    def cluster_check(self) -> "SubmissionCheck":
        from gpuyard.engines.cluster.site_checks import SubmissionCheck  # with the first job for a cluster

        return SubmissionCheck(site_to_ask)

    async def submit(self, request: Request) -> SubmitResult:
        return await self.take(await self._read_body(request.body))

    async def preview(self, request: Request) -> SubmissionPreview:
        """Check a submission as `submit` does, and return its jobs. Nothing is stored."""
        submission, notes = await self._fit(await self._read_body(request.body))
        if submission.after_each:  # its indexes are read twice
            submission = replace(submission, elements=list(submission.elements))
        self._scheduler.requests.check(submission)
        jobs = []
        for element in islice(submission.elements, 1000):
            values = element.values if element.index is None else {**element.values, "index": str(element.index)}
            command = submission.spec.command if element.command is None else element.command
            filled = shlex.join(fill_in(command, values) if values else command)
            jobs.append(PreviewedJob(command=filled, index=element.index, values=element.values))
        return SubmissionPreview(count=submission.count, varies=submission.spec.varies, jobs=jobs, notes=notes)

    async def _read_body(self, body: bytes) -> Submission:
        """Parse a submission. A file of a hundred thousand commands and a large sweep take seconds: other requests are
        served meanwhile."""
        engine = self._scheduler.controller.rules.engine
        if len(body) <= 256 * 1024 and b'"sweep"' not in body:
            return _read(body, engine)
        return await asyncio.to_thread(_read, body, engine)

    async def resubmit(self, job_id: int, body: ResubmitBody) -> SubmitResult:
        job = find_job(self._scheduler, job_id)
        submission = resubmission(job, body.arguments, body.options, body.token)
        submission = replace(submission, submitters=body.submitters)
        if job.spec.code.snapshot is None:  # it runs the code of now
            code = await self._code.record(submission.spec.command, job.spec.cwd)
            submission = replace(submission, spec=replace(submission.spec, code=code))
        check_name(submission.spec.engine or LOCAL)
        is_new = not body.token or self._scheduler.store.find_submission(body.token) is None
        result = await self.take(submission)
        if is_new:
            await self._scheduler.checkpoints.may_write()
            store, now = self._scheduler.store, self._scheduler.clock.now()
            with store.transaction():
                store.add_event(job_id, now, "resubmitted", f"as job {result.ids}")
        return result

    async def take(self, submission: Submission) -> SubmitResult:
        token = submission.token
        if not token.isprintable():
            raise UserError("the token takes plain text")
        if self._scheduler.home_problem is not None:
            raise EnvironmentFault(self._scheduler.home_problem, hint="the next command starts a new daemon")
        task = self._arriving.get(token) if token else None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._take_in(submission))
            if token:
                self._arriving[token] = task
                task.add_done_callback(lambda _: self._arriving.pop(token, None))
        return await asyncio.shield(task)  # a client that disconnects must not leave half a submission behind

    async def _take_in(self, submission: Submission) -> SubmitResult:
        scheduler = self._scheduler
        is_new = not submission.token or scheduler.store.find_submission(submission.token) is None
        submission, notes = await self._fit(submission, is_new=is_new)
        names = secret_variables(submission.spec.environment, scheduler.controller.rules.secret_names)
        submission = replace(submission, spec=replace(submission.spec, secrets=names))
        is_paused = bool(scheduler.store.setting("paused"))
        # A keeper is started while many jobs are stored; for fewer, that would only delay the answer.
        if submission.count >= 100 and not submission.spec.engine and not is_paused:
            scheduler.prepare_to_start()
        try:
            pieces = scheduler.requests.submit(submission, self._user)
            first, last = await run_in_pieces(pieces, scheduler.checkpoints.may_write)
            self._code.note_submission(first, submission.spec.code)
            self.snapshots.note_submission(submission.spec.code.snapshot)
            await scheduler.checkpoints.synced()
        finally:
            # To start its jobs, or to delete what is stored of it if it was refused.
            call_after_answer(scheduler.wake)
        if is_paused:
            notes.append("the queue is paused: `gpuyard unpause` resumes it")
        notes += self._notes(submission)
        if submission.dependencies or submission.after_each:
            job = scheduler.store.job(first)
            if job is not None and job.state is JobState.REJECTED:
                notes.append(f"it will never start: {job.reason}")
        ids = str(first) if first == last else f"{first}-{last}"
        return SubmitResult(ids=ids, first=first, last=last, count=last - first + 1, notes=notes)

    async def _fit(self, submission: Submission, *, is_new: bool = True) -> tuple[Submission, list[str]]:
        """Refuse what this machine can never run; return the submission as it is stored, and notes about it."""
        scheduler, notes = self._scheduler, list[str]()
        fault = scheduler.controller.start_pauses.config_fault
        if is_new and fault is not None:
            raise UserError(fault)
        if is_new:
            self.snapshots.check(submission.spec)
        submission = with_container_tool(submission)
        if not is_new:
            return submission, notes
        if (spec := submission.spec).engine:
            await asyncio.to_thread(self.cluster_check.check, spec)
        if _concerns_devices(spec):
            snapshot = await self.read_devices()
            submission = _fit_here(submission, snapshot)
            spec, ledger = submission.spec, scheduler.ledger
            if (silent := silent_probe(spec.need.vendor, snapshot)) is not None and not spec.engine:
                how = "it waits until that answers" if spec.need.devices else "its runs reserve no GPU"
                notes.append(f"{silent.sentence}: {how}; `gpuyard doctor` says more")
            closed = closed_devices(snapshot, ledger.read_drains(), (), ledger.read_health_marks())
            notes += closed_notes(spec, snapshot, closed)
            notes += filter(None, [due_note(scheduler.ledger.folder)])
        elif spec.need.host is not None:
            submission = _fit_here(submission, (await scheduler.sampling.fresh(_SAMPLE_FOR_SUBMIT_S)).snapshot)
        if submission.at is not None:
            submission = replace(submission, not_before=read_start_time(submission.at, scheduler.clock))
        return submission, notes

    def _notes(self, submission: Submission) -> Iterator[str]:
        """Yield notes about notifications, the container, what the job cannot have of the limits and the niceness of
        the shell that submitted it, and its priority at Slurm."""
        spec = submission.spec
        yield from _notify_warnings(spec)
        yield from _container_notes(spec)
        if spec.shell is not None and not spec.engine:
            for each in unattainable(spec.shell, self._shell, self._hard_limits, is_root=os.geteuid() == 0):
                yield f"the job does not get {each}; to allow it, run `gpuyard daemon restart` in this shell"
        if spec.engine == "slurm" and submission.priority > (most := load_config().slurm.nice_base):
            yield (
                f"priority {submission.priority} puts it before jobs that wait here; Slurm gets it as {most} "
                "(`nice_base` under [slurm]). `gpuyard priority JOBS -10` puts other jobs behind it there, too"
            )

    async def read_devices(self) -> Snapshot:
        """Return a snapshot. In the first 5 s of the daemon, wait for a vendor's probe if GPUs of others are known: a
        driver may take longer than a sample, and a job that is meant for its GPUs must not go to others."""
        sampling = self._scheduler.sampling
        snapshot = (await sampling.fresh(_SAMPLE_FOR_SUBMIT_S)).snapshot
        while time.monotonic() < self._first_reading_by and snapshot.silent and silent_probe(None, snapshot) is None:
            await asyncio.sleep(0.2)
            snapshot = (await asyncio.shield(sampling.request())).snapshot
        return snapshot


def _read(body: bytes, default_engine: str) -> Submission:
    """Parse a submission. Batches stay on this machine, because its load paces them."""
    request = decode_body(body, SubmissionBody, may_hold_bytes=True)
    if "engine" not in request.options and "concurrency" not in request.options:
        request.options["engine"] = default_engine
    # The web page has no directory and no variables: those are the user's home and the daemon's environment.
    environment = dict(os.environ) if request.environment is None else request.environment
    submission = parse_submission(replace(request, cwd=request.cwd or str(Path.home()), environment=environment))
    check_name(submission.spec.engine or LOCAL)
    return submission


def _concerns_devices(spec: JobSpec) -> bool:
    return bool(spec.need.devices) or (spec.pace is not None and spec.pace.gates_devices)


def _fit_here(submission: Submission, snapshot: Snapshot) -> Submission:
    """Fit a submission, or an edited job, to this machine. UserError if it could never run."""
    spec, config = submission.spec, load_config()
    if spec.need.host is not None and not spec.engine:
        check_host(spec.need, snapshot.host, config.host.limits)
    if not _concerns_devices(spec):
        return submission
    plugged = vendors_on_pci() if snapshot.silent else ()
    return fit_to_machine(submission, snapshot, config.devices.banned_ids(snapshot), config.devices.vendor, plugged)


def with_container_tool(submission: Submission) -> Submission:
    """Choose the tool that runs the container, and add the configured options."""
    spec = submission.spec
    if spec.container is None:
        return submission
    config = load_config().containers
    tool = choose_tool(config.tool, spec.environment.get("PATH"))
    given = tuple(option for option in spec.container.options if option not in config.options)
    container = replace(spec.container, tool=tool, options=(*config.options, *given))
    return replace(submission, spec=replace(spec, container=container))


def _container_notes(spec: JobSpec) -> Iterator[str]:
    """Yield which tool runs the container; for a command that starts one itself, why `--image` is better."""
    if spec.container is not None:
        yield f"{spec.container.tool} runs it in a container of {spec.container.image}"
        if spec.container.tool == "podman" and not has_podman_init():
            yield "podman has no init for containers: `cancel` may take until the kill; install catatonit"
    elif not spec.engine and (tool := bare_container_tool(spec.command)):
        yield (
            f"{tool} starts its program outside of this job: gpuyard can neither measure nor stop it, and does not "
            "limit it to the job's GPU; use `gpuyard submit --image IMAGE -- COMMAND` instead "
            "(docs/how-to/containers.md)"
        )


def _notify_warnings(spec: JobSpec) -> Iterator[str]:
    """Yield why notifications about the job could not be delivered."""
    if not spec.notify:
        return
    from gpuyard.daemon.notify.delivery import apprise_missing, has_apprise

    configured = load_config().notify.to
    targets = [target for each in spec.notify for target in (configured if each.target is None else (each.target,))]
    if any(each.target is None for each in spec.notify) and not configured:
        yield "--notify has no target and [notify] in config.toml has none: no notification will be sent"
    if any(map(is_url, targets)) and not has_apprise():
        yield apprise_missing()


def closed_notes(spec: JobSpec, snapshot: Snapshot, closed: Mapping[str, Reason]) -> list[str]:
    """Return which GPUs take no new work, and what to do, if the others are too few for the job. `closed` has the
    reason of each drained or faulty GPU."""
    if not spec.need.devices or spec.engine:
        return []
    suitable = [device for device in snapshot.unsplit_devices() if check_suitable(spec.need, device) is None]
    named = []
    for device in suitable:
        text, remedy = f"unhealthy: {device.fault}", REMEDIES["unhealthy"]
        if device.healthy:
            if (reason := closed.get(device.id)) is None:
                continue
            text, remedy = reason.text, reason.remedy
        label = snapshot.labels.get(device.id, device.id)
        remedy = f"`gpuyard devices undrain {label}`" if "undrain" in remedy else remedy
        named.append(f"GPU {label} is {text} ({remedy})")
    if not named or len(suitable) - len(named) >= spec.need.devices:
        return []
    more = f"; and {len(named) - 4} more" if len(named) > 4 else ""
    return [f"it waits: too few GPUs that suit it take new work: {'; '.join(named[:4])}{more}"]


class EditHandler:
    def __init__(self, scheduler: SchedulerLoop, jobs: JobHandler, submissions: SubmissionHandler) -> None:
        self._scheduler, self._jobs, self._submissions = scheduler, jobs, submissions

    async def edit(self, body: EditRequest) -> ChangeSummary:
        snapshot = await self._submissions.read_devices()
        scheduler = self._scheduler
        edits = JobEdits(scheduler.database, scheduler.store)
        for spec in await self._new_specs(body, edits):
            await asyncio.to_thread(self._submissions.cluster_check.check, spec)
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

    async def _new_specs(self, body: EditRequest, edits: JobEdits) -> list[JobSpec]:
        """Return those that a cluster has to be asked about, before any job is changed: no node may ever take such a
        job. An option that is wrong is left to the editor."""
        from gpuyard.engines.cluster.site_checks import terms_of

        found = list[JobSpec]()
        for selection in await self._jobs.selection.pieces(body):
            for job in edits.one_of_each_spec(selection.ranges):
                with contextlib.suppress(UserError):
                    spec = edited(job, body.options).spec
                    check_name(spec.engine or LOCAL)
                    if spec.engine and (spec.engine, terms_of(spec)) != (job.spec.engine, terms_of(job.spec)):
                        found.append(spec)
        return found

    def _fit(self, submission: Submission, snapshot: Snapshot) -> Submission:
        """Fit an edited job to this machine, as a submission. UserError if it could never run."""
        check_name(submission.spec.engine or LOCAL)
        submission = _fit_here(with_container_tool(submission), snapshot)
        spec = submission.spec
        names = secret_variables(spec.environment, self._scheduler.controller.rules.secret_names)
        return replace(submission, spec=replace(spec, secrets=names))
