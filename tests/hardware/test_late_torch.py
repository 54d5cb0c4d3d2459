"""On a machine with an NVIDIA card and PyTorch: PyTorch uses the leased card, at any position of its import."""

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


def output_of(before: str, inside: str, uuid: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT.format(before=before, inside=inside), uuid]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout)
    return output


@pytest.mark.parametrize(("before", "inside"), [
    ("", "pass"),
    ("import torch", "pass"),
    ("import torch; torch.cuda.is_available()", "pass"),
    ("import torch; torch.cuda.init()", "pass"),
    ("", "os.environ['CUDA_VISIBLE_DEVICES'] = sys.argv[1]"),
], ids=["imported inside", "imported before", "CUDA asked before", "CUDA set up before", "hidden inside"])  # fmt: skip
def test_pytorch_uses_the_leased_card(before: str, inside: str) -> None:
    for _, uuid, _ in cards():
        result = output_of(before, inside, uuid)
        assert result["uuid"] == uuid
        assert result["current"] == result["device"]
        if result["held"] is None:
            assert result["gpu_ids"] == [result["current"]]


def test_pytorch_uses_the_leased_card_though_cuda_visible_devices_reorders_the_cards() -> None:
    shown = ",".join(uuid for _, uuid, _ in reversed(cards()))
    for place, (_, uuid, _) in enumerate(reversed(cards())):
        result = output_of("", "pass", uuid, CUDA_VISIBLE_DEVICES=shown)
        assert (result["uuid"], result["gpu_ids"], result["current"]) == (uuid, [place], place)
