"""Which option or setting lets work start that does not start as things are.

A job that waits for a lease needs none: leases end by themselves. Options are those of `gpuyard submit` and `gpuyard
run`; a script has the arguments of `GPUScheduler`.
"""

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceRoom
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.core.units import format_size

_VRAM = "--vram SIZE (in a script: vram=)"
_REMEDIES = {
    ReasonKind.BANNED: "banned and banned_names under [devices] in the configuration keep jobs off this GPU",
    ReasonKind.UNHEALTHY: "`gpuyard doctor` says what to do about a GPU that is not well",
    ReasonKind.OCCUPIED: f"with {_VRAM} it starts beside other programs, where so much is free",
    ReasonKind.FOREIGN_LOAD: (
        "--max-gpu 100 (in a script: utilization_threshold_percent=100) lets it start beside them, "
        "max_foreign_load_percent under [queue] in the configuration all jobs"
    ),
    ReasonKind.LOADED: "max_load_percent under [packing] in the configuration says how busy a GPU may be",
    ReasonKind.TOO_MANY: "max_jobs_per_device under [packing] in the configuration says how many may share a GPU",
    ReasonKind.TOO_BUSY: "--max-gpu (in a script: utilization_threshold_percent=) is the job's own limit",
    ReasonKind.TOO_HUNGRY: "--max-power-w (in a script: power_threshold_w=) is the job's own limit",
    ReasonKind.TOO_FULL: "--max-gpu-mem-mb is the job's own limit",
    ReasonKind.HOST_TOO_BUSY: "--max-cpu is the job's own limit",
    ReasonKind.HOST_TOO_FULL: "--min-free-mem-mb or --ram is the job's own limit",
    ReasonKind.TAG_LIMIT: "[queue.tags] in the configuration, or max_jobs_per_gpu of a workspace, is the limit",
    ReasonKind.ARRAY_LIMIT: "--array RANGE%N set the limit when it was submitted",
    ReasonKind.CPU_LIMIT: "cpu_jobs under [queue] in the configuration is the limit",
}


def remedy_for(kind: ReasonKind, need: Need | None = None, room: DeviceRoom | None = None) -> str:
    """Return it as a sentence without its full stop; an empty one where there is none, or none is needed."""
    if kind is ReasonKind.NO_ROOM and need is not None and room is not None:
        return _remedy_for_no_room(need, room)
    return _REMEDIES.get(kind, "")


def _remedy_for_no_room(need: Need, room: DeviceRoom) -> str:
    if room.free_mb is None:
        return "without --vram it gets the GPU alone"
    once_leases_end = room.without().free_mb or 0.0
    if need.memory_mb is None or once_leases_end >= need.memory_mb:
        return ""
    left = f"programs without a lease leave {format_size(max(0.0, once_leases_end))}"
    if need.takes_rest:
        return f"{left}, and a first run asks for {format_size(need.memory_mb)}: with {_VRAM} it asks for less"
    return f"{left}: with {_VRAM} it asks for less"
