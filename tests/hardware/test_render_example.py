"""On a machine with an NVIDIA card and PyTorch: the example renders the same pictures on the card as without one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.render_pictures import EXAMPLE, LABELS, pictures

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("render")
    for name in ("make_set.py", "shapes.py", "renderer.py"):
        shutil.copy(EXAMPLE / name, folder)
    subprocess.run([sys.executable, "make_set.py", "set"], cwd=folder, check=True, timeout=120)
    return folder


def render(folder: Path, out: str, device: str) -> Any:
    command = [
        sys.executable, "-m", "gpuyard", "render", "set/manifest.json", "--renderer", "renderer:render_label",
        "--out", out, "--device", device, "--vram-budget", "1G", "--ram-budget", "1G", "--json",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_numpy_and_torch_render_the_same_pictures_apart_from_rounding(example: Path) -> None:
    report = render(example, "on-card", "cuda")
    assert (report["status"]["rendered"], report["status"]["device"]) == (60, "cuda:0")
    assert report["status"]["vram"]["peak_allocator"] > report["status"]["vram"]["peak_assets"], "the card computes"
    assert render(example, "on-host", "host")["status"]["device"] == "host"
    on_card, on_host = pictures(example / "on-card"), pictures(example / "on-host")
    assert sorted(on_card) == sorted(on_host) == LABELS
    for name in LABELS:
        away = np.abs(on_card[name].astype(int) - on_host[name].astype(int)).max(-1)
        # Rounding decides which of two equally near points is visible.
        assert (away > 16).mean() < 0.01, name
        assert away.mean() < 0.5, name


def test_rendering_on_the_card_is_deterministic(example: Path) -> None:
    for out in ("first", "second"):
        render(example, out, "cuda")
    for name in LABELS:
        first, second = (example / out / name / "image.png" for out in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name
