"""Scenes and actors in VRAM and RAM on a budget, in one process, for workers that render or generate data.

with Coordinator(vram="44G", ram="90G", scene_slots=5) as c:
    c.run(units, render_label)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.residency.actors import ActorCache
    from gpuyard.residency.coordinator import Coordinator
    from gpuyard.residency.loading import Loader
    from gpuyard.residency.scenes import SceneManager
    from gpuyard.residency.units import Label, Unit
    from gpuyard.residency.worker import Worker

__all__ = ["ActorCache", "Coordinator", "Label", "Loader", "SceneManager", "Unit", "Worker"]

_HOMES = {
    "ActorCache": "actors",
    "Coordinator": "coordinator",
    "Label": "units",
    "Loader": "loading",
    "SceneManager": "scenes",
    "Unit": "units",
    "Worker": "worker",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
