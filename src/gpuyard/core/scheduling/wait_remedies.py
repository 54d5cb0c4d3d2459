"""The option or setting that lets a waiting job start.

A job that waits for a lease needs none: leases end by themselves. The options are those of `gpuyard submit` and
`gpuyard run`; scripts use the arguments of `GPUScheduler`.
"""

from gpuyard.core.lease import Need, RestOfDevice
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.core.units import format_size

_VRAM = "--vram SIZE (in a script: vram=)"
_REMEDIES = {
    ReasonKind.BANNED: "remove this GPU from banned and banned_names under [devices] in the configuration",
    ReasonKind.UNHEALTHY: "`gpuyard doctor` says how to repair an unhealthy GPU",
    ReasonKind.OCCUPIED: f"with {_VRAM} it starts beside other programs, if that much is free",
    ReasonKind.FOREIGN_LOAD: (
        "--max-gpu 100 (in a script: utilization_threshold_percent=100) lets this job start beside them, "
        "max_foreign_load_percent under [queue] in the configuration lets all jobs"
    ),
    ReasonKind.LOADED: "raise max_load_percent under [packing] in the configuration",
    ReasonKind.TOO_MANY: "raise max_jobs_per_device under [packing] in the configuration",
    ReasonKind.TOO_BUSY: "--max-gpu (in a script: utilization_threshold_percent=) is the job's own limit",
    ReasonKind.TOO_HUNGRY: "--max-power-w (in a script: power_threshold_w=) is the job's own limit",
    ReasonKind.TOO_FULL: "--max-gpu-mem-mb is the job's own limit",
    ReasonKind.HOST_TOO_BUSY: "--max-cpu is the job's own limit",
    ReasonKind.HOST_TOO_FULL: "--min-free-mem-mb or --ram is the job's own limit",
    ReasonKind.TAG_LIMIT: "raise max_jobs_per_gpu of the workspace, or the tag's limit in [queue.tags]",
    ReasonKind.ARRAY_LIMIT: "submit with a larger N in --array RANGE%N, or a larger --concurrency of a batch",
    ReasonKind.CPU_LIMIT: "raise cpu_jobs under [queue] in the configuration",
}


def remedy_for(kind: ReasonKind, need: Need | None = None, state: DeviceState | None = None) -> str:
    """Return a sentence without its full stop, or an empty text where no remedy exists or is needed."""
    if kind is ReasonKind.NO_ROOM and need is not None and state is not None:
        return _remedy_for_memory(need, state)
    return _REMEDIES.get(kind, "")


def _remedy_for_memory(need: Need, state: DeviceState) -> str:
    if state.free_mb is None:
        return "without --vram it gets the whole GPU"
    once_leases_end = state.without().free_mb or 0.0
    if need.required_mb is None or once_leases_end >= need.required_mb:
        return ""
    left = f"programs outside gpuyard leave {format_size(max(0.0, once_leases_end))}"
    if isinstance(need.memory, RestOfDevice):
        return f"{left}, and a first run asks for {format_size(need.required_mb)}: with {_VRAM} it asks for less"
    return f"{left}: with {_VRAM} it asks for less"
