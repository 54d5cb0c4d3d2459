"""Faults of assets in VRAM and RAM: loans, budgets, streams, outputs."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        id="residency-held-scene-is-evicted",
        file="src/gpuyard/recipes/render/planning/transfer_plan.py",
        old="            if stage is Stage.THERE\n            and key not in self._state.held\n",
        new="            if stage is Stage.THERE\n",
        breaks="A scene is dropped from VRAM while a renderer reads it.",
        near=("tests/unit/recipes/render/planning/test_transfer_plan.py",),
    ),
    Fault(
        id="residency-loan-is-not-given-back",
        file="src/gpuyard/recipes/render/memory/assets_in_use.py",
        old="    finally:\n        tiers.give_back(loan)\n",
        new="    finally:\n        pass\n",
        breaks="A render stops forever once all scene slots have been used.",
        near=("tests/unit/recipes/render/test_render_run.py::test_more_scenes_than_slots_are_rendered_in_turn",),
    ),
    Fault(
        id="residency-budget-is-exceeded",
        file="src/gpuyard/recipes/render/planning/transfer_plan.py",
        old="        if self._missing(asset).is_positive:\n            return False\n",
        new="",
        breaks="A render takes more VRAM than its budget, and other jobs run out of memory.",
        near=("tests/unit/recipes/render/planning/test_transfer_plan.py",),
    ),
    Fault(
        id="residency-frame-in-use-is-overwritten",
        file="src/gpuyard/recipes/render/memory/assets_in_use.py",
        old="        slot = next(slot for slot in self._slots if slot is not keep)\n",
        new="        slot = self._slots[0]\n",
        breaks="The next frame of a streamed actor overwrites the frame that is being rendered.",
        near=("tests/unit/recipes/render/memory/test_stream_frames.py",),
    ),
    Fault(
        id="residency-changed-file-is-read",
        file="src/gpuyard/recipes/render/memory/named_arrays.py",
        old="    if now != before:\n",
        new="    if now.nbytes != before.nbytes:\n",
        breaks="Labels are rendered from a file that was changed during the run.",
        near=("tests/unit/recipes/render/memory/test_ply_file.py",),
    ),
    Fault(
        id="residency-two-runs-in-one-folder",
        file="src/gpuyard/recipes/render/write_outputs.py",
        old="        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        new="        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        breaks="A second run empties the folder in which the first run is rendering.",
        near=("tests/unit/recipes/render/test_write_outputs.py",),
    ),
    Fault(
        id="residency-output-named-before-it-is-on-disk",
        file="src/gpuyard/recipes/render/write_outputs.py",
        old="                _flush(folder)\n                folder.rename(path)\n",
        new="                folder.rename(path)\n",
        breaks="After a power failure --resume keeps outputs that are empty.",
        near=("tests/unit/recipes/render/test_write_outputs.py",),
    ),
    Fault(
        id="residency-out-of-memory-is-not-tried-again",
        file="src/gpuyard/recipes/render/memory/assets_in_use.py",
        old="        for kind, most in ((Kind.ACTOR, None), (Kind.SCENE, 1)):\n",
        new="        for kind, most in ((Kind.ACTOR, None),):\n",
        breaks="A renderer that runs out of memory skips labels that would fit without the idle scenes.",
        near=("tests/unit/recipes/render/memory/test_asset_tiers.py",),
    ),
)
