"""Keep scenes and actors in VRAM and RAM within budgets, in one process, for workers that render or generate data.

with Coordinator(vram="44G", ram="90G", scene_slots=5) as c:
    c.run(units, render_label)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.residency.loading.asset_loader import Loader
    from gpuyard.residency.planning.render_units import Label, Unit
    from gpuyard.residency.running.coordinator import Coordinator
    from gpuyard.residency.running.render_worker import Worker
    from gpuyard.residency.tiers.hold_assets import ActorCache, SceneManager

__all__ = ["ActorCache", "Coordinator", "Label", "Loader", "SceneManager", "Unit", "Worker"]

_MODULES = {
    "ActorCache": "tiers.hold_assets",
    "Coordinator": "running.coordinator",
    "Label": "planning.render_units",
    "Loader": "loading.asset_loader",
    "SceneManager": "tiers.hold_assets",
    "Unit": "planning.render_units",
    "Worker": "running.render_worker",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
