"""Routes that submit jobs, and that give waiting jobs other options. A submission with a token is stored once, however
often it is sent.
"""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import convert
from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.daemon.api.codec import decode_body
from gpuyard.daemon.api.jobs import JobHandler, find_job
from gpuyard.daemon.api.slow_requests import call_after_answer, run_in_pieces
from gpuyard.daemon.code_snapshots import CodeSnapshots
from gpuyard.daemon.code_watch import CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.notify.delivery import apprise_missing, has_apprise
from gpuyard.daemon.server.http_messages import Request
from gpuyard.engines.cluster.site_checks import SubmissionCheck, terms_of
from gpuyard.engines.containers.container_commands import choose_tool, has_podman_init
from gpuyard.engines.open_cluster_engine import LOCAL, check_name, site_to_ask
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.ledger.neighbours import due_note
from gpuyard.model.container import bare_container_tool
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.placeholders import ArrayElement, fill_in
from gpuyard.model.resubmit import edited, resubmission
from gpuyard.model.shell_environment import ShellSettings, secret_variables, unattainable
from gpuyard.model.submission import Submission, parse_submission
from gpuyard.model.subscriptions import is_url
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.device_names import silent_probe
from gpuyard.policy.host_room import check_host
from gpuyard.policy.machine import check_suitable
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.probes.kernel_files import vendors_on_pci
from gpuyard.queue.add_submission import read_start_time
from gpuyard.queue.edit_jobs import JobEditor, fit_to_machine
from gpuyard.schema.queue import ChangeSummary, PreviewedJob, SubmissionPreview, SubmitResult
from gpuyard.schema.requests import EditRequest, ResubmitBody, SubmissionBody
from gpuyard.store.delete_and_edit_jobs import JobEdits
from gpuyard.system.processes import user_name
from gpuyard.system.submitting_shell import hard_limits, read_shell_settings

_MOST_SHOWN = 1000
_MOST_NAMED = 4
_SAMPLE_FOR_SUBMIT_S = 10.0
# After the start of the daemon, a driver may take longer than the deadline of a sample. Where another vendor's GPUs are
# known, a job that is meant for the slow one's must not go there.
_FIRST_READING_S, _ASK_AGAIN_S = 5.0, 0.2
_LONG_BODY = 256 * 1024
# Jobs. A keeper is started meanwhile; for fewer, that would only delay the answer.
_LONG_TO_STORE = 100


class SubmissionHandler:
    def __init__(self, scheduler: SchedulerLoop, code: CodeWatch, snapshots: CodeSnapshots) -> None:
        self._scheduler = scheduler
        self._code, self.snapshots = code, snapshots
        self._user = user_name(os.getuid())
        self._first_reading_by = time.monotonic() + _FIRST_READING_S
        self._shell, self._hard_limits = convert(read_shell_settings(), ShellSettings), hard_limits()
        self.cluster_check = SubmissionCheck(site_to_ask)
        self._arriving: dict[str, asyncio.Task[SubmitResult]] = {}

    async def submit(self, request: Request) -> SubmitResult:
        return await self.take(await self._read_body(request.body))

    async def preview(self, request: Request) -> SubmissionPreview:
        """Check a submission as `submit` does, and return its jobs. Nothing is stored."""
        submission, notes = await self._fit(await self._read_body(request.body))
        if submission.after_each:  # its indexes are read twice
            submission = replace(submission, elements=list(submission.elements))
        self._scheduler.requests.check(submission)
        return preview_of(submission, notes)

    async def _read_body(self, body: bytes) -> Submission:
        """Parse a submission. A file of a hundred thousand commands and a large sweep take seconds: other requests are
        served meanwhile."""
        engine = self._scheduler.controller.rules.engine
        if len(body) <= _LONG_BODY and b'"sweep"' not in body:
            return _read(body, engine)
        return await asyncio.get_running_loop().run_in_executor(None, _read, body, engine)

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
            with self._scheduler.store.transaction():
                self._scheduler.store.add_event(
                    job_id, self._scheduler.clock.now(), "resubmitted", f"as job {result.ids}"
                )
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
        is_large = submission.count >= _LONG_TO_STORE
        if is_large and not submission.spec.engine and not scheduler.store.setting("paused"):
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
        notes += ["the queue is paused: `gpuyard unpause` resumes it"] if scheduler.store.setting("paused") else []
        notes += [*_notify_warnings(submission.spec), *_container_notes(submission.spec)]
        notes += [*self._shell_notes(submission.spec), *_priority_notes(submission)]
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
        if is_new and submission.spec.engine:
            await asyncio.get_running_loop().run_in_executor(None, self.cluster_check.check, submission.spec)
        pace = submission.spec.pace
        if is_new and submission.spec.need.host is not None and not submission.spec.engine:
            host = (await scheduler.sampling.fresh(_SAMPLE_FOR_SUBMIT_S)).snapshot.host
            check_host(submission.spec.need, host, load_config().host.limits)
        if is_new and (submission.spec.need.devices or (pace is not None and pace.gates_devices)):
            snapshot = await self.read_devices()
            devices = load_config().devices
            banned, plugged = devices.banned_ids(snapshot), vendors_on_pci() if snapshot.silent else ()
            submission = fit_to_machine(submission, snapshot, banned, devices.vendor, plugged)
            ledger = scheduler.ledger
            notes += _silence_notes(submission.spec, snapshot)
            closed = closed_devices(snapshot, ledger.read_drains(), (), ledger.read_health_marks())
            notes += closed_notes(submission.spec, snapshot, closed)
            notes += filter(None, [due_note(scheduler.ledger.folder)])
        if is_new and submission.at is not None:
            submission = replace(submission, not_before=read_start_time(submission.at, scheduler.clock))
        return submission, notes

    def _shell_notes(self, spec: JobSpec) -> list[str]:
        """Return what the job cannot have of the limits and the niceness of the shell that submitted it."""
        if spec.shell is None or spec.engine:
            return []
        found = unattainable(spec.shell, self._shell, self._hard_limits, is_root=os.geteuid() == 0)
        advice = "to allow it, run `gpuyard daemon restart` in this shell"
        return [f"the job does not get {each}; {advice}" for each in found]

    async def read_devices(self) -> Snapshot:
        """Return a snapshot. In the first 5 s of the daemon, wait for a vendor's probe if GPUs of others are known."""
        sampling = self._scheduler.sampling
        snapshot = (await sampling.fresh(_SAMPLE_FOR_SUBMIT_S)).snapshot
        while time.monotonic() < self._first_reading_by and snapshot.silent and silent_probe(None, snapshot) is None:
            await asyncio.sleep(_ASK_AGAIN_S)
            snapshot = (await asyncio.shield(sampling.request())).snapshot
        return snapshot


def _silence_notes(spec: JobSpec, snapshot: Snapshot) -> Iterator[str]:
    """Yield what becomes of a job whose GPUs cannot be read, because a probe does not answer."""
    silent = silent_probe(spec.need.vendor, snapshot)
    if silent is not None and not spec.engine:
        how = "it waits until that answers" if spec.need.devices else "its runs reserve no GPU"
        yield f"{silent.sentence}: {how}; `gpuyard doctor` says more"


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


def _priority_notes(submission: Submission) -> list[str]:
    if submission.spec.engine != "slurm" or submission.priority <= (most := load_config().slurm.nice_base):
        return []
    order = f"priority {submission.priority} puts it before jobs that wait here"
    at_slurm = f"Slurm gets it as {most} (`nice_base` under [slurm])"
    return [f"{order}; {at_slurm}. `gpuyard priority JOBS -10` puts other jobs behind it there, too"]


def _container_notes(spec: JobSpec) -> list[str]:
    """Return which tool runs the container; for a command that starts one itself, why `--image` is better."""
    if spec.container is None:
        tool = None if spec.engine else bare_container_tool(spec.command)
        explained = "starts its program outside of this job: gpuyard can neither measure nor stop it, and does not"
        advice = "use `gpuyard submit --image IMAGE -- COMMAND` instead (docs/how-to/containers.md)"
        return [f"{tool} {explained} limit it to the job's GPU; {advice}"] if tool else []
    notes = [f"{spec.container.tool} runs it in a container of {spec.container.image}"]
    if spec.container.tool == "podman" and not has_podman_init():
        notes.append("podman has no init for containers: `cancel` may take until the kill; install catatonit")
    return notes


def _notify_warnings(spec: JobSpec) -> list[str]:
    """Return why notifications about the job could not be delivered."""
    if not spec.notify:
        return []
    try:
        configured = load_config().notify.to
    except GpuyardError:  # the daemon keeps the settings it read before and has logged the error
        configured = ()
    targets = [target for each in spec.notify for target in (configured if each.target is None else (each.target,))]
    warnings = []
    if any(each.target is None for each in spec.notify) and not configured:
        warnings.append("--notify has no target and [notify] in config.toml has none: no notification will be sent")
    if any(map(is_url, targets)) and not has_apprise():
        warnings.append(apprise_missing())
    return warnings


def closed_notes(spec: JobSpec, snapshot: Snapshot, closed: Mapping[str, Reason]) -> list[str]:
    """Return which GPUs take no new work, and what to do, if the others are too few for the job. `closed` has the
    reason of each drained or faulty GPU."""
    if not spec.need.devices or spec.engine:
        return []
    suitable = [device for device in snapshot.unsplit_devices() if check_suitable(spec.need, device) is None]
    shut = {device.id: reason for device in suitable if (reason := _reason(device, closed)) is not None}
    if not shut or len(suitable) - len(shut) >= spec.need.devices:
        return []
    named = [
        f"GPU {label} is {reason.text} ({_remedy(reason, label)})"
        for label, reason in ((snapshot.labels.get(each, each), reason) for each, reason in shut.items())
    ]
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return [f"it waits: too few GPUs that suit it take new work: {'; '.join(named[:_MOST_NAMED])}{more}"]


def _reason(device: Device, closed: Mapping[str, Reason]) -> Reason | None:
    if device.healthy:
        return closed.get(device.id)
    text = f"unhealthy: {device.fault}"
    return Reason(ReasonKind.UNHEALTHY, text, device.id, remedy=REMEDIES["unhealthy"])


def _remedy(reason: Reason, label: str) -> str:
    return f"`gpuyard devices undrain {label}`" if "undrain" in reason.remedy else reason.remedy


def preview_of(submission: Submission, notes: Sequence[str]) -> SubmissionPreview:
    shown = islice(submission.elements, _MOST_SHOWN)
    return SubmissionPreview(
        count=submission.count,
        varies=submission.spec.varies,
        jobs=[_preview_job(submission, element) for element in shown],
        notes=list(notes),
    )


def _preview_job(submission: Submission, element: ArrayElement) -> PreviewedJob:
    values = element.values if element.index is None else {**element.values, "index": str(element.index)}
    command = submission.spec.command if element.command is None else element.command
    filled = fill_in(command, values) if values else command
    return PreviewedJob(command=shlex.join(filled), index=element.index, values=element.values)


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
