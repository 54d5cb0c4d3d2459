"""gpuyard: watch GPUs, decide when and where the next piece of work runs, and keep it safe.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib

from gpuyard.version import __version__

TYPE_CHECKING = False  # not from typing: importing that takes a third of what a command may take
if TYPE_CHECKING:
    from typing import Any

    from gpuyard.client import Client
    from gpuyard.core.snapshot import Device, Host, Problem, Process, Snapshot
    from gpuyard.probes.local_machine import snapshot
    from gpuyard.scripting.gpu_scheduler import (
        BANNED_GPU_NAMES,
        BANNED_GPUS,
        GPUScheduler,
        find_free_gpus,
        get_gpu_info,
        get_gpu_memory_usage,
        get_gpu_names,
        get_gpu_power_usage,
        get_gpu_utilization,
        get_total_num_gpus,
    )

__all__ = [
    "BANNED_GPUS",
    "BANNED_GPU_NAMES",
    "Client",
    "Device",
    "GPUScheduler",
    "Host",
    "Problem",
    "Process",
    "Snapshot",
    "__version__",
    "find_free_gpus",
    "get_gpu_info",
    "get_gpu_memory_usage",
    "get_gpu_names",
    "get_gpu_power_usage",
    "get_gpu_utilization",
    "get_total_num_gpus",
    "snapshot",
]
_HOMES = {
    **dict.fromkeys(__all__, "gpuyard.scripting.gpu_scheduler"),
    **dict.fromkeys(("Device", "Host", "Problem", "Process", "Snapshot"), "gpuyard.core.snapshot"),
    "Client": "gpuyard.client",
    "snapshot": "gpuyard.probes.local_machine",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuyard' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
