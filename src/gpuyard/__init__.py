"""gpuyard: watch GPUs, decide when and where the next piece of work runs, and keep it safe.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.core.model import Device, Host, Problem, Process, Snapshot
    from gpuyard.probes.local import snapshot

__version__ = "0.1.0"

_HOMES = {
    "Device": "gpuyard.core.model",
    "Host": "gpuyard.core.model",
    "Problem": "gpuyard.core.model",
    "Process": "gpuyard.core.model",
    "Snapshot": "gpuyard.core.model",
    "snapshot": "gpuyard.probes.local",
}
__all__ = ["Device", "Host", "Problem", "Process", "Snapshot", "__version__", "snapshot"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuyard' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
