"""gpuyard: watch GPUs, and schedule jobs on them.

The public names below are imported when they are first used, so importing the package takes almost no time."""

from gpuyard.version import __version__

TYPE_CHECKING = False  # importing typing would take a third of the time that a command may take
if TYPE_CHECKING:
    from typing import Any

    from gpuyard.client.client import Client
    from gpuyard.model.machine_snapshot import Device, Host, Problem, Process, Snapshot
    from gpuyard.probes.local_machine import snapshot
    from gpuyard.report_progress import progress
    from gpuyard.scripting.gpu_info import (
        BANNED_GPU_NAMES,
        BANNED_GPUS,
        find_free_gpus,
        get_gpu_info,
        get_gpu_memory_usage,
        get_gpu_names,
        get_gpu_power_usage,
        get_gpu_utilization,
        get_total_num_gpus,
    )
    from gpuyard.scripting.gpu_scheduler import GPUScheduler

__all__ = [
    "BANNED_GPUS", "BANNED_GPU_NAMES", "Client", "Device", "GPUScheduler", "Host", "Problem", "Process", "Snapshot",
    "__version__", "find_free_gpus", "get_gpu_info", "get_gpu_memory_usage", "get_gpu_names", "get_gpu_power_usage",
    "get_gpu_utilization", "get_total_num_gpus", "progress", "snapshot",
]  # fmt: skip
_MODULES = {
    **dict.fromkeys(__all__, "gpuyard.scripting.gpu_info"),
    **dict.fromkeys(("Device", "Host", "Problem", "Process", "Snapshot"), "gpuyard.model.machine_snapshot"),
    "Client": "gpuyard.client.client",
    "GPUScheduler": "gpuyard.scripting.gpu_scheduler",
    "progress": "gpuyard.report_progress",
    "snapshot": "gpuyard.probes.local_machine",
}


def __getattr__(name: str) -> "Any":
    if name not in _MODULES and name != "torch":
        raise AttributeError(f"module 'gpuyard' has no attribute '{name}'")
    import importlib  # takes as long as ten modules of ours

    if name == "torch":
        return importlib.import_module("gpuyard.torch")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gpuyard"):
            raise
        raise ModuleNotFoundError(_explain_missing(error.name), name=error.name) from None


def _explain_missing(module: str | None) -> str:
    """Return how to install what gpuyard needs, where it is used from a checkout that is not installed."""
    import os
    import shlex
    import sys

    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    what = f"-e {shlex.quote(checkout)}" if os.path.exists(f"{checkout}/pyproject.toml") else "gpuyard"
    return f"gpuyard needs {module}, which is not installed: {shlex.quote(sys.executable)} -m pip install {what}"


def __dir__() -> list[str]:
    return sorted(__all__)
