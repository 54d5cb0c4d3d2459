"""The example and the guide to rendering, typed as they stand, on simulated GPUs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.queue_fixture import end_leftovers
from tests.render_pictures import EXAMPLE, LABELS, Picture, pictures

BIN = Path(sys.executable).parent
GUIDE = EXAMPLE.parents[1] / "docs/how-to/render.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NO_CACHE = {"PYTHONDONTWRITEBYTECODE": "1"}

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


def type_all(page: Path, folder: Path) -> str:
    """Every block goes on where the last one ended; what was printed, in one."""
    return "".join(type_block(language, code, folder) for language, code in BLOCK.findall(page.read_text()))


def type_block(language: str, code: str, folder: Path) -> str:
    if language == "python":
        command = [sys.executable, "-c", code]
    else:
        lines = code.splitlines()
        assert all(line.startswith(("$ ", ">")) for line in lines), "what is shown is what to type"
        command = ["sh", "-ec", "\n".join(line[2:] for line in lines)]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0, f"{code}\n{told.stdout}{told.stderr}"
    return told.stdout


@pytest.mark.full
def test_the_example_renders_the_same_pictures_with_all_in_memory_and_with_half_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "render"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "set", "out"))
    told = type_all(folder / "README.md", folder)
    assert told.count("60 of 60 labels rendered") == 2
    assert "24 streamed" in told, "no actor fits beside the scenes in the smaller budget"
    seen = pictures(folder / "out")
    assert sorted(seen) == LABELS
    for name, picture in seen.items():
        assert picture.shape == (192, 256, 3), name
        assert colours(picture) > 2000, f"{name} has many colours"
    assert len({picture.tobytes() for picture in seen.values()}) == 60, "no two are alike"
    for name in LABELS:
        assert (folder / "small" / name / "image.png").read_bytes() == (
            folder / "out" / name / "image.png"
        ).read_bytes()


def colours(picture: Picture) -> int:
    """How many there are, each as one number: rows of three are sorted far more slowly."""
    return len(np.unique(picture.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)))


def test_an_actor_is_seen_where_it_is_and_moves(tmp_path: Path) -> None:
    set_up = [sys.executable, str(EXAMPLE / "make_set.py"), str(tmp_path / "set")]
    subprocess.run(set_up, check=True, env={**os.environ, **NO_CACHE})
    camera = {"eye": [0, -9, 3], "target": [0, 0.4, 1], "fov": 42}
    entries = [
        {"scene": "set/scenes/rings.ply", "camera": camera, "name": "empty", "frames": []},
        *(
            {
                "scene": "set/scenes/rings.ply",
                "actor": "set/actors/walker",
                "camera": camera,
                "name": name,
                "frames": [n],
            }
            for name, n in (("begins", 0), ("ends", 11))
        ),
    ]
    (tmp_path / "manifest.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    command = [
        sys.executable, "-m", "gpuyard", "render", str(tmp_path / "manifest.jsonl"), "--out", str(tmp_path / "out"),
        "--renderer", "renderer:render_label", "--vram-budget", "64M", "--ram-budget", "64M",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=EXAMPLE, env={**os.environ, **NO_CACHE})
    seen = pictures(tmp_path / "out")
    begins, ends = (columns_that_differ(seen[name], seen["empty"]) for name in ("begins", "ends"))
    assert begins.max() < 128 < ends.min(), "it goes from the left to the right"


def columns_that_differ(one: Picture, other: Picture) -> Picture:
    return np.flatnonzero((one != other).any((0, 2)))


def test_the_guide_leads_from_files_and_a_function_to_rendered_labels(tmp_path: Path, own_home: Path) -> None:
    folder = tmp_path / "guide"
    folder.mkdir()
    try:
        told = type_all(GUIDE, folder)
    finally:
        end_leftovers(own_home)
    for text in (
        "5 of 5 labels rendered",
        "scenes/attic.ply: there is no such file",
        "1 of 6 labels rendered, 5 existed already",
        "12 rendered, 0 skipped",
    ):
        assert text in told
    labels = ["attic", "hall-1", "hall-2", "roof", "yard-1", "yard-2"]
    assert sorted(path.parent.name for path in folder.glob("out/*/above.pgm")) == labels
    assert len((folder / "out/roof/above.pgm").read_bytes()) == len(b"P5 128 128 255\n") + 128 * 128
    assert float((folder / "cellar/cellar/lowest.txt").read_text()) < 0
