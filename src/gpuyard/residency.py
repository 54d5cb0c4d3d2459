"""Keep scenes and actors in VRAM and RAM within budgets, in one process, for workers that render or generate data.

with Coordinator(vram="44G", ram="90G", scene_slots=5) as c:
    c.run(units, render_label)"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuyard.recipes.render.coordinator import Coordinator
    from gpuyard.recipes.render.memory.assets_in_use import ActorCache, SceneManager
    from gpuyard.recipes.render.memory.read_asset_files import Loader
    from gpuyard.recipes.render.planning.assets_and_units import Label, Unit
    from gpuyard.recipes.render.render_worker import Worker
    from gpuyard.recipes.render.write_outputs import SkipsUnwritten

_MODULES = {
    "ActorCache": "gpuyard.recipes.render.memory.assets_in_use",
    "Coordinator": "gpuyard.recipes.render.coordinator",
    "Label": "gpuyard.recipes.render.planning.assets_and_units",
    "Loader": "gpuyard.recipes.render.memory.read_asset_files",
    "SceneManager": "gpuyard.recipes.render.memory.assets_in_use",
    "SkipsUnwritten": "gpuyard.recipes.render.write_outputs",
    "Unit": "gpuyard.recipes.render.planning.assets_and_units",
    "Worker": "gpuyard.recipes.render.render_worker",
}
__all__ = ["ActorCache", "Coordinator", "Label", "Loader", "SceneManager", "SkipsUnwritten", "Unit", "Worker"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
