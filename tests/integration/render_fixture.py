"""A set of small assets, a manifest over them, and renderers that a test can hold, break and kill."""

import contextlib
import fcntl
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import until
from tests.residency_files import points, splats, write_ply

SCENES, ACTORS, FRAMES, LABELS = 3, 2, 3, 4
BUDGETS = ("--device", "host", "--vram-budget", "2M", "--ram-budget", "4M", "--workers", "2")
DEADLINE_S = 90.0

RENDERERS = '''
import fcntl, itertools, json, os, pathlib, signal, threading, time
import numpy as np

def render(scene, frames, label, out_dir):
    """Write a deterministic digest of all arguments."""
    parts = ([scene] if scene else []) + list(frames)
    sums = [[float(np.asarray(part[name], "f8").sum()) for name in part] for part in parts]
    (out_dir / "image.json").write_text(json.dumps({"sums": sums, "label": label}, sort_keys=True))

def gated(scene, frames, label, out_dir):
    """Begin, and continue when the gate is open."""
    pathlib.Path("begun", label["name"]).touch()
    with open("gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    render(scene, frames, label, out_dir)

def failing(scene, frames, label, out_dir):
    if label["camera"] == 1:
        raise ValueError("no such camera")
    render(scene, frames, label, out_dir)

def recording_order(scene, frames, label, out_dir):
    with open("order", "a") as order:
        order.write(label["name"] + "\\n")
    render(scene, frames, label, out_dir)

calls = itertools.count(1)

def count_call(most):
    """Return the number of this call. Later calls than `most` wait for the end, so that labels are left."""
    number = next(calls)
    if number > most:
        threading.Event().wait()
    return number

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying(scene, frames, label, out_dir):
    """Die in the middle of the seventh output, after another one was renamed."""
    count = count_call(7)
    if count == 7:
        (out_dir / "image.json").write_text("half of it")
        assert is_one_renamed.wait(30)
        die()
    render(scene, frames, label, out_dir)

rename, is_one_renamed = pathlib.Path.rename, threading.Event()

def recorded_rename(*paths):
    rename(*paths)
    is_one_renamed.set()

pathlib.Path.rename = recorded_rename

def dying_before_rename(scene, frames, label, out_dir):
    count = count_call(5)
    render(scene, frames, label, out_dir)
    if count == 5:
        assert is_one_renamed.wait(30)
        pathlib.Path.rename = lambda *_: die()

def dying_after_rename(scene, frames, label, out_dir):
    """Die after renaming an output, while another is not renamed yet."""
    count = count_call(5)
    render(scene, frames, label, out_dir)
    if count == 5:
        pathlib.Path.rename = rename_and_die

def rename_and_die(*paths):
    pathlib.Path.rename = lambda *_: threading.Event().wait()
    rename(*paths)
    deadline = time.monotonic() + 30
    while not any(paths[0].parent.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    die()

def load(path):
    with np.load(path) as arrays:
        return dict(arrays)
'''


@pytest.fixture
def folder(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: `scenes`, `actors`, `renderers.py`, and a `gate` that is open."""
    here = own_home.parent
    monkeypatch.chdir(here)
    (here / "renderers.py").write_text(RENDERERS)
    (here / "begun").mkdir()
    (here / "gate").touch()
    (here / "scenes").mkdir()
    for scene in range(SCENES):
        write_ply(here / f"scenes/room{scene}.ply", splats(1500, scene))
    for actor in range(ACTORS):
        (here / f"actors/walk{actor}").mkdir(parents=True)
        for frame in range(FRAMES):
            write_ply(here / f"actors/walk{actor}/{frame}.ply", points(4000, 10 * actor + frame))
    write_manifest(here / "manifest.jsonl", *entries())
    return here


def entries() -> list[dict[str, Any]]:
    return [
        {
            "scene": f"scenes/room{scene}.ply",
            "actor": f"actors/walk{actor}",
            "fov": 60,
            "labels": [{"name": f"{scene}-{actor}-{camera}", "camera": camera} for camera in range(LABELS)],
        }
        for scene in range(SCENES)
        for actor in range(ACTORS)
    ]


ALL = {label["name"] for entry in entries() for label in entry["labels"]}


def write_manifest(path: Path, *written: Any) -> None:
    path.write_text("".join(each if isinstance(each, str) else f"{json.dumps(each)}\n" for each in written))


def render(
    function: str = "render", *arguments: str, manifest: str = "manifest.jsonl", **options: Any
) -> "subprocess.CompletedProcess[str]":
    return run("render", manifest, "--renderer", f"renderers:{function}", *BUDGETS, *arguments, **options)


@contextlib.contextmanager
def rendering(function: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a render in the background."""
    command = [*GPUYARD, "render", "manifest.jsonl", "--renderer", f"renderers:{function}", *BUDGETS, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def closed_gate() -> Iterator[Callable[[], None]]:
    """Close the gate until the block ends or the yielded function is called. Begin before a renderer is started."""
    with Path("gate").open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(gate, fcntl.LOCK_UN)


def await_begun(count: int) -> set[str]:
    until(lambda: len(list(Path("begun").iterdir())) >= count, f"the beginning of {count} labels")
    return {path.name for path in Path("begun").iterdir()}


def outputs(root: str = "out") -> dict[str, bytes]:
    """Return the content of every output file by path, without hidden files."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }


def rendered(root: str = "out") -> set[str]:
    return {path.name for path in Path(root).iterdir() if path.is_dir() and not path.name.startswith(".")}


def skipped(root: str = "out") -> list[Any]:
    return [json.loads(line) for line in Path(root, "skipped.jsonl").read_text().splitlines()]
