"""On a machine with an NVIDIA card and PyTorch: PyTorch uses the leased card, wherever the script imports it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hardware.test_visibility import cards

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

SCRIPT = """
import json, os, sys
from gpuyard import GPUScheduler
{before}
with GPUScheduler(specific_gpus=sys.argv[1], vram="2G", quiet=True) as gpu_ids:
    {inside}
    import torch
    block = torch.ones(1024, device="cuda")
    print(json.dumps({{
        "gpu_ids": gpu_ids,
        "current": torch.cuda.current_device(),
        "device": block.device.index,
        "uuid": "GPU-" + str(torch.cuda.get_device_properties(block.device).uuid),
        "held": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }}))
assert [finder for finder in sys.meta_path if "gpuyard" in type(finder).__module__] == []
"""


@pytest.fixture(autouse=True)
def own_ledger(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def told(before: str, inside: str, uuid: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT.format(before=before, inside=inside), uuid]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    return said


@pytest.mark.parametrize(("before", "inside"), [
    ("", "pass"),
    ("import torch", "pass"),
    ("import torch; torch.cuda.is_available()", "pass"),
    ("import torch; torch.cuda.init()", "pass"),
    ("", "os.environ['CUDA_VISIBLE_DEVICES'] = sys.argv[1]"),
], ids=["imported inside", "imported before", "CUDA asked before", "CUDA set up before", "hidden inside"])  # fmt: skip
def test_pytorch_uses_the_leased_card(before: str, inside: str) -> None:
    for _, uuid, _ in cards():
        said = told(before, inside, uuid)
        assert said["uuid"] == uuid
        assert said["current"] == said["device"]
        if said["held"] is None:
            assert said["gpu_ids"] == [said["current"]]


def test_under_a_variable_that_reorders_the_cards_it_is_the_leased_card_too() -> None:
    shown = ",".join(uuid for _, uuid, _ in reversed(cards()))
    for place, (_, uuid, _) in enumerate(reversed(cards())):
        said = told("", "pass", uuid, CUDA_VISIBLE_DEVICES=shown)
        assert (said["uuid"], said["gpu_ids"], said["current"]) == (uuid, [place], place)
