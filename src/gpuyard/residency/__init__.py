"""Keep scenes and actors in VRAM and RAM within budgets, in one process, for workers that render or generate data.

with Coordinator(vram="44G", ram="90G", scene_slots=5) as c:
    c.run(units, render_label)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.residency.loading.asset_loader import Loader
    from gpuyard.residency.planning.render_units import Label, Unit
    from gpuyard.residency.running.coordinator import Coordinator
    from gpuyard.residency.running.output_folders import SkipsUnwritten
    from gpuyard.residency.running.render_worker import Worker
    from gpuyard.residency.tiers.hold_assets import ActorCache, SceneManager

__all__ = ["ActorCache", "Coordinator", "Label", "Loader", "SceneManager", "SkipsUnwritten", "Unit", "Worker"]

_MODULES = {
    "ActorCache": "gpuyard.residency.tiers.hold_assets",
    "Coordinator": "gpuyard.residency.running.coordinator",
    "Label": "gpuyard.residency.planning.render_units",
    "Loader": "gpuyard.residency.loading.asset_loader",
    "SceneManager": "gpuyard.residency.tiers.hold_assets",
    "SkipsUnwritten": "gpuyard.residency.running.output_folders",
    "Unit": "gpuyard.residency.planning.render_units",
    "Worker": "gpuyard.residency.running.render_worker",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
