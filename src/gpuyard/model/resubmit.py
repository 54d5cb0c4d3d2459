"""Submits a job again, or edits one that waits: the options of the first submission, with the user's changes."""

from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.command_line import SHELL, change_arguments, is_change_of_arguments
from gpuyard.model.job import Job
from gpuyard.model.job_spec import RetryCause
from gpuyard.model.lease import WholeDevice
from gpuyard.model.option_values import Options
from gpuyard.model.placeholders import ArrayElement, fill_in
from gpuyard.model.stopping import warning_text
from gpuyard.model.submission import LOCAL, Submission, SubmissionRequest, parse_submission
from gpuyard.model.submit_options import NOT_EDITED, SUBMIT_OPTIONS
from gpuyard.model.subscriptions import subscription_text


def resubmission(job: Job, command: tuple[str, ...] | None, options: dict[str, Any], token: str = "") -> Submission:
    """Return a submission of one job like this one, with its directory and environment, that names this job as its
    origin. `options` replace those of the job; an option that is None is removed."""
    _refuse_part_of_whole(job, f"`gpuyard retry {job.id}` runs it again after it has ended")
    for name, value in options.items():
        if value is not None and name in SUBMIT_OPTIONS and SUBMIT_OPTIONS[name].makes_many:
            raise UserError(f"--{name} makes many jobs, and resubmit makes one", hint="use `gpuyard submit`")
    variables = options.get("env") or []
    texts = [variables] if isinstance(variables, str) else variables
    given = {str(each).partition("=")[0] for each in texts}
    if missing := [name for name in job.spec.dropped if name not in given]:
        raise UserError(
            f"gpuyard keeps no secrets of jobs that have ended: job {job.id} lacks {', '.join(missing)}",
            hint=f"give it with env, such as {missing[0]}=…; {missing[0]}= runs without it",
            code="conflict",
        )
    if command is not None and is_change_of_arguments(command):
        if job.argv[:2] == SHELL:
            hint = "write the whole command after --"
            raise UserError(f"job {job.id} runs a shell line, whose arguments cannot be told apart", hint=hint)
        command = change_arguments(job.argv, command)
    submission = _changed(job, command, options, token)
    return replace(submission, spec=replace(submission.spec, resubmitted_from=job.id))


def edited(job: Job, options: dict[str, Any]) -> Submission:
    """Return what a waiting job becomes with these options. `options` as for `resubmission`."""
    spec = job.spec
    _refuse_part_of_whole(job, "change it there")
    for name in options:
        if name in NOT_EDITED:
            raise UserError(f"--{name} cannot be changed after the submission", hint=NOT_EDITED[name])
    if spec.dropped:
        raise UserError(f"it lacks {', '.join(spec.dropped)}: release or retry it first, in a shell that has them")
    new = _changed(job, None, options, "")
    kept = {"is_array": spec.is_array, "stagger_s": spec.stagger_s, "resubmitted_from": spec.resubmitted_from}
    return replace(new, spec=replace(new.spec, **kept))


def _changed(job: Job, command: tuple[str, ...] | None, options: dict[str, Any], token: str) -> Submission:
    spec = job.spec
    filled = {  # the variables with this job's values in place of placeholders
        name: fill_in((spec.environment[name],), job.placeholders)[0]
        for name in spec.filled_variables
        if name in spec.environment
    }
    request = SubmissionRequest(
        cwd=spec.cwd,
        environment={**spec.environment, **filled},
        shell=spec.shell,
        token=token,
        configuration=spec.configuration if command is None else "",
        framework=spec.framework if command is None else "",
        code=spec.code if command is None else replace(spec.code, script=None, digest=None),
        command=command or spec.command or job.argv,
        options=_change_options(options_of(job), options),
    )
    element = ArrayElement(index=job.index)
    if command is None:
        element = ArrayElement(index=job.index, values=job.values, command=job.command)
    submission = replace(parse_submission(request), elements=(element,))
    if "notify" in options:
        return submission
    return replace(submission, spec=replace(submission.spec, notify=spec.notify))


def _refuse_part_of_whole(job: Job, hint: str) -> None:
    spec = job.spec
    if spec.task is not None:
        workspace = spec.task.workspace
        raise UserError(
            f"job {job.id} is a task of the workspace {workspace}, which has one for each config", hint=hint
        )
    if spec.pace is not None:
        raise UserError(f"job {job.id} is a run of a batch, which is paced as a whole", hint=hint)


def options_of(job: Job) -> dict[str, Any]:
    """Return the options with which `gpuyard submit` would make this job, without those that are the default."""
    spec, need, container = job.spec, job.spec.need, job.spec.container
    found: dict[str, Any] = {
        "vram": _digits(need.required_mb),
        "exclusive": need.devices > 0 and isinstance(need.memory, WholeDevice),
        "device": None if need.only is None else ",".join(need.only),
        "ram": _digits(need.ram_mb),
        "priority": job.priority,
        "retry-on": list(spec.retry_on) if len(spec.retry_on) < len(RetryCause) else None,
        "signal": spec.warning and warning_text(spec.warning),
        "engine": spec.engine or LOCAL,
        "image": container and container.image,
        "mount": list(map(str, container.mounts)) if container else None,
        "container-option": list(container.options) if container else None,
        "notify": list(map(subscription_text, spec.notify)) or None,
    }
    defaults = Options({}, SUBMIT_OPTIONS)
    for option in SUBMIT_OPTIONS.values():
        value = None if option.field is None else attrgetter(option.field)(spec)
        if value not in (None, "", defaults[option.name]):
            is_digits = option.kind in ("size", "time")
            found[option.name] = _digits(value) if is_digits else list(value) if option.is_repeatable else value
    return {name: value for name, value in found.items() if value is not None and value is not False and value != []}


def _change_options(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply the changes. Without a GPU, or on another engine, drop the options that no longer apply."""
    drops_gpu = str(changes.get("gpus")) == "0"
    moves = "engine" in changes and changes["engine"] != before["engine"]
    kept = {
        name: value
        for name, value in before.items()
        if not (drops_gpu and SUBMIT_OPTIONS[name].is_for_gpu)
        and not (moves and (SUBMIT_OPTIONS[name].is_local or name == "engine-option"))
    }
    return {**kept, **changes}


def _digits(number: float | None) -> str | None:
    """Format a size or a time without an exponent, which the option parser does not accept."""
    return None if number is None else f"{number:f}"
