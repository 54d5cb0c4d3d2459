"""Scenes and actors in VRAM and RAM on a budget, in one process, for workers that render or generate data.

with Coordinator(vram="44G", ram="90G", scene_slots=5) as c:
    c.run(units, render_label)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.residency.loading.asset_loader import Loader
    from gpuyard.residency.planning.render_units import Label, Unit
    from gpuyard.residency.running.coordinator import Coordinator
    from gpuyard.residency.running.render_worker import Worker
    from gpuyard.residency.tiers.actor_cache import ActorCache
    from gpuyard.residency.tiers.scene_manager import SceneManager

__all__ = ["ActorCache", "Coordinator", "Label", "Loader", "SceneManager", "Unit", "Worker"]

_HOMES = {
    "ActorCache": "tiers.actor_cache",
    "Coordinator": "running.coordinator",
    "Label": "planning.render_units",
    "Loader": "loading.asset_loader",
    "SceneManager": "tiers.scene_manager",
    "Unit": "planning.render_units",
    "Worker": "running.render_worker",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
