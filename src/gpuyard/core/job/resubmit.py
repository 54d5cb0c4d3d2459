"""A job once more: what its user said of it, as they would have typed it, with what they say differently now."""

from typing import Any

from msgspec.structs import replace

from gpuyard.core.job.job import Job, JobSpec
from gpuyard.core.job.submission import ArrayElement, Submission, SubmissionRequest, parse_submission
from gpuyard.core.notify.subscriptions import subscription_text
from gpuyard.errors import UserError

# What goes with a GPU, and what only this machine's own can be asked for: neither outlives a change of mind about that.
_OF_GPUS = ("vram", "exclusive", "vendor", "gpu-name", "device", "preempt", "max-gpu", "max-gpu-mem-mb", "max-power-w")
_OF_THIS_MACHINE = ("device", "preempt", "max-gpu", "max-gpu-mem-mb", "max-power-w", "max-cpu")

_MANY = ("array", "sweep", "concurrency")


def resubmission(job: Job, command: tuple[str, ...] | None, options: dict[str, Any], token: str = "") -> Submission:
    """A single job like this one, with its folder and its environment; an option that is `None` is taken back."""
    _refuse(job)
    many = next((name for name in _MANY if options.get(name) is not None), None)
    if many is not None:
        raise UserError(f"--{many} makes many jobs, and this is one once more", hint="submit those anew")
    spec = job.spec
    asked = SubmissionRequest(
        cwd=spec.cwd,
        environment=spec.environment,
        token=token,
        configuration=spec.configuration if command is None else "",
        command=command or spec.command or job.argv,
        options=_changed(options_of(job), options),
    )
    element = (
        ArrayElement(index=job.index, values=job.values, command=job.command)
        if command is None
        else ArrayElement(index=job.index)
    )
    submission = replace(parse_submission(asked), elements=(element,))
    if "notify" in options:
        return submission
    return replace(submission, spec=replace(submission.spec, notify=spec.notify))


def options_of(job: Job) -> dict[str, Any]:
    """As `gpuyard submit` would have been given them."""
    spec, need = job.spec, job.spec.need
    found = {
        "gpus": need.devices,
        "vram": _plain(need.memory_mb),
        "exclusive": need.devices > 0 and need.is_exclusive and not spec.learns_memory,
        "vendor": need.vendor and str(need.vendor),
        "gpu-name": need.model,
        "device": None if need.only is None else ",".join(need.only),
        "max-gpu": need.max_utilization_percent,
        "max-power-w": need.max_power_w,
        "max-gpu-mem-mb": need.max_memory_used_mb,
        "max-cpu": need.max_cpu_percent,
        "ram": _plain(need.min_host_memory_mb),
        "priority": job.priority,
        **_of_spec(spec),
    }
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _of_spec(spec: JobSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "tag": spec.tag or None,
        "retries": spec.retries,
        "time-limit": _plain(spec.time_limit_s),
        "grace": _plain(spec.grace_s),
        "duration": _plain(spec.duration_s),
        "on-reboot": spec.on_reboot and str(spec.on_reboot),
        "stdin": spec.stdin,
        "log-cap": _plain(spec.log_cap_mb),
        "preempt": spec.preempts,
        "on-preempt": str(spec.on_preempt),
        "engine": spec.engine or "local",
        "engine-option": list(spec.engine_options) or None,
        "cpus": spec.cpus,
        "notify": list(map(subscription_text, spec.notify)) or None,
    }


def _changed(before: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    dropped: tuple[str, ...] = ()
    if str(options.get("gpus")) == "0":
        dropped += _OF_GPUS
    if "engine" in options and options["engine"] != before["engine"]:
        dropped += (*_OF_THIS_MACHINE, "engine-option")
    return {**{name: value for name, value in before.items() if name not in dropped}, **options}


def _refuse(job: Job) -> None:
    if job.spec.task is not None:
        raise UserError(
            f"job {job.id} is a task of the workspace {job.spec.task.workspace}, which has one for each config",
            hint=f"`gpuyard retry {job.id}` runs it again, once it has ended",
        )
    if job.spec.pace is not None:
        raise UserError(
            f"job {job.id} is a run of a batch, which is paced as a whole",
            hint=f"`gpuyard retry {job.id}` runs it again, once it has ended",
        )


def _plain(number: float | None) -> str | None:
    """Digits only: a size or a time is not typed with an exponent."""
    return None if number is None else f"{number:f}"
