"""Submits a job again, or edits one that waits: the options of the first submission, with the user's changes."""

from typing import Any

from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.command_line import SHELL, change_arguments, is_change_of_arguments
from gpuyard.model.job import Job
from gpuyard.model.job_spec import DEFAULT_LOG_CAP_MB, RetryCause
from gpuyard.model.lease import WholeDevice
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
    given = _names(options.get("env"))
    if missing := [name for name in job.spec.dropped if name not in given]:
        raise UserError(
            f"gpuyard keeps no secrets of jobs that have ended: job {job.id} lacks {', '.join(missing)}",
            hint=f"give it with env, such as {missing[0]}=…; {missing[0]}= runs without it",
            code="conflict",
        )
    submission = _changed(job, None if command is None else _new_command(job, command), options, token)
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
    request = SubmissionRequest(
        cwd=spec.cwd,
        environment=_filled_environment(job),
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


def _new_command(job: Job, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command, or the job's own with other arguments where it names only these."""
    if not is_change_of_arguments(command):
        return command
    if job.argv[:2] == SHELL:
        raise UserError(
            f"job {job.id} runs a shell line, whose arguments cannot be told apart",
            hint="write the whole command after --",
        )
    return change_arguments(job.argv, command)


def _refuse_part_of_whole(job: Job, hint: str) -> None:
    spec = job.spec
    belongs_to = ""
    if spec.task is not None:
        belongs_to = f"a task of the workspace {spec.task.workspace}, which has one for each config"
    elif spec.pace is not None:
        belongs_to = "a run of a batch, which is paced as a whole"
    if belongs_to:
        raise UserError(f"job {job.id} is {belongs_to}", hint=hint)


def options_of(job: Job) -> dict[str, Any]:
    """Return the options with which `gpuyard submit` would make this job."""
    spec, need = job.spec, job.spec.need
    found = {
        "gpus": need.devices,
        "vram": _digits(need.required_mb),
        "exclusive": need.devices > 0 and isinstance(need.memory, WholeDevice),
        "vendor": need.vendor and str(need.vendor),
        "gpu-name": need.model,
        "linked": need.is_linked,
        "same-node": need.is_on_one_node,
        "device": None if need.only is None else ",".join(need.only),
        "max-gpu": need.max_utilization_percent,
        "max-power-w": need.max_power_w,
        "max-gpu-mem-mb": need.max_memory_used_mb,
        "max-cpu": need.max_cpu_percent,
        "min-free-mem-mb": need.min_host_memory_mb,
        "ram": _digits(need.ram_mb),
        "priority": job.priority,
        "name": spec.name,
        "tag": spec.tag or None,
        "retries": spec.retries,
        "retry-on": list(spec.retry_on) if len(spec.retry_on) < len(RetryCause) else None,
        "retry-delay": _digits(spec.retry_delay_s),
        "time-limit": _digits(spec.time_limit_s),
        "grace": _digits(spec.grace_s),
        "signal": spec.warning and warning_text(spec.warning),
        "duration": _digits(spec.duration_s),
        "on-reboot": spec.on_reboot and str(spec.on_reboot),
        "stdin": spec.stdin,
        "log-cap": None if spec.log_cap_mb == DEFAULT_LOG_CAP_MB else _digits(spec.log_cap_mb),
        "min-free-disk": _digits(spec.disk.min_free_mb),
        "output": spec.output,
        "error": spec.error,
        "split-stderr": spec.split_stderr,
        "timestamps": spec.timestamps,
        "preempt": spec.preempts,
        "on-preempt": str(spec.on_preempt),
        "engine": spec.engine or LOCAL,
        "engine-option": list(spec.engine_options) or None,
        "cpus": spec.cpus,
        "image": spec.container and spec.container.image,
        "mount": list(map(str, spec.container.mounts)) if spec.container else None,
        "container-option": list(spec.container.options) if spec.container else None,
        "notify": list(map(subscription_text, spec.notify)) or None,
    }
    return {name: value for name, value in found.items() if value is not None and value is not False}


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


def _names(variables: str | list[str] | None) -> set[str]:
    """Return the names of the variables that the option `env` sets."""
    texts = [variables] if isinstance(variables, str) else variables or []
    return {str(each).partition("=")[0] for each in texts}


def _filled_environment(job: Job) -> dict[str, str]:
    """Return the variables with this job's values in place of placeholders."""
    filled = {
        name: fill_in((job.spec.environment[name],), job.placeholders)[0]
        for name in job.spec.filled_variables
        if name in job.spec.environment
    }
    return {**job.spec.environment, **filled}


def _digits(number: float | None) -> str | None:
    """Format a size or a time without an exponent, which the option parser does not accept."""
    return None if number is None else f"{number:f}"
