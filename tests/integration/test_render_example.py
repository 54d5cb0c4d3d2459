"""Runs the commands of the rendering example and guide as written, on simulated GPUs."""

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
    """Run all code blocks of a page in order, and return their combined output."""
    return "".join(type_block(language, code, folder) for language, code in BLOCK.findall(page.read_text()))


def type_block(language: str, code: str, folder: Path) -> str:
    if language == "python":
        command = [sys.executable, "-c", code]
    else:
        lines = code.splitlines()
        assert all(line.startswith(("$ ", ">")) for line in lines), "a console block has a line that is no command"
        command = ["sh", "-ec", "\n".join(line[2:] for line in lines)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, f"{code}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.mark.full
def test_the_example_renders_the_same_pictures_with_all_or_half_of_the_memory(tmp_path: Path) -> None:
    folder = tmp_path / "render"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "set", "out"))
    output = type_all(folder / "README.md", folder)
    assert output.count("60 of 60 labels rendered") == 2
    assert "24 streamed" in output, "no actor fits beside the scenes in the smaller budget"
    rendered = pictures(folder / "out")
    assert sorted(rendered) == LABELS
    for name, picture in rendered.items():
        assert picture.shape == (192, 256, 3), name
        assert colours(picture) > 2000, f"{name} has many colours"
    assert len({picture.tobytes() for picture in rendered.values()}) == 60, "no two are alike"
    for name in LABELS:
        assert (folder / "small" / name / "image.png").read_bytes() == (
            folder / "out" / name / "image.png"
        ).read_bytes()


def colours(picture: Picture) -> int:
    """Count the distinct colours, each as one number: sorting rows of three is far slower."""
    return len(np.unique(picture.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)))


def test_an_actor_is_rendered_at_its_position_and_moves(tmp_path: Path) -> None:
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
    rendered = pictures(tmp_path / "out")
    begins, ends = (columns_that_differ(rendered[name], rendered["empty"]) for name in ("begins", "ends"))
    assert begins.max() < 128 < ends.min(), "the actor moves from left to right"


def columns_that_differ(one: Picture, other: Picture) -> Picture:
    return np.flatnonzero((one != other).any((0, 2)))


def test_the_guide_renders_labels_from_files_and_a_function(tmp_path: Path, own_home: Path) -> None:
    folder = tmp_path / "guide"
    folder.mkdir()
    try:
        output = type_all(GUIDE, folder)
    finally:
        end_leftovers(own_home)
    for text in (
        "5 of 5 labels rendered",
        "scenes/attic.ply: there is no such file",
        "1 of 6 labels rendered, 5 existed already",
        "12 rendered, 0 skipped",
    ):
        assert text in output
    labels = ["attic", "hall-1", "hall-2", "roof", "yard-1", "yard-2"]
    assert sorted(path.parent.name for path in folder.glob("out/*/above.pgm")) == labels
    assert len((folder / "out/roof/above.pgm").read_bytes()) == len(b"P5 128 128 255\n") + 128 * 128
    assert float((folder / "cellar/cellar/lowest.txt").read_text()) < 0
