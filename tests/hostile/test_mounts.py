"""Mounts in folders that gpuyard copies or removes, such as the remote data of a job: real FUSE, and bind mounts."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.recipes.batch.prune_empty_runs import prune
from gpuyard.recipes.uninstall import InstalledFiles, remove
from gpuyard.system.folder_tree import remove_tree
from tests.fakes.queue_command import run
from tests.hostile.catalogue import attack
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.unit.recipes import AT, RUN, WHY

pytestmark = pytest.mark.needs("bindfs", "mount", "umount")
Mount = Callable[[Path], None]
PRECIOUS = "precious"


@pytest.fixture
def store(place: Path) -> Path:
    """A folder of data that is mounted elsewhere."""
    (place / "store" / "deep").mkdir(parents=True)
    for path in (place / "store" / "data", place / "store" / "deep" / "data"):
        path.write_text(PRECIOUS)
    return place / "store"


@pytest.fixture(params=["bind", "fuse", "dead fuse", "file"])
def mount(request: pytest.FixtureRequest, store: Path) -> Iterator[Mount]:
    """Mount the store, or a file of it, in a folder. The program behind a dead mount is gone."""
    mounted: list[Path] = []
    programs: list[subprocess.Popen[bytes]] = []
    kind = request.param

    def mount_in(folder: Path) -> None:
        target = folder / "remote"
        if kind == "file":
            target.write_text("")
        else:
            target.mkdir()
        mounted.append(target)
        if kind in ("bind", "file"):
            source = store / "data" if kind == "file" else store
            subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
            return
        program = subprocess.Popen(["bindfs", "-f", str(store), str(target)])
        programs.append(program)
        until(lambda: os.path.ismount(target), "the mount")
        if kind == "dead fuse":
            program.kill()
            program.wait()

    yield mount_in
    for target in mounted:
        subprocess.run(["umount", "--lazy", str(target)], check=False, capture_output=True)
    for program in programs:
        program.kill()
        program.wait()


def is_whole(store: Path) -> bool:
    return [(store / path).read_text() for path in ("data", "deep/data")] == [PRECIOUS, PRECIOUS]


def unmount(target: Path) -> None:
    subprocess.run(["umount", str(target)], check=True)


@attack(
    "mount a remote store in the snapshot that a job runs in",
    now="harmless: it is no result; the snapshot stays until it is unmounted, and a notice names the mount",
)
def test_a_mount_in_a_snapshot(
    queue: QueueUnderTest, place: Path, store: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = place / "project"
    tree.mkdir()
    monkeypatch.chdir(tree)
    gate = queue.gate()
    script = f"read word < {gate}; echo r > result"
    job = int(run("submit", "--gpus", "0", "--snapshot", "--", "/bin/sh", "-c", script).stdout)
    queue.until_state(job, "running")
    [name] = os.listdir(queue.home / "snapshots")
    mount(queue.home / "snapshots" / name / "tree")
    gate.write_text("go\n")
    assert queue.wait(job)["succeeded"] == 1
    assert os.listdir(tree) == ["result"]
    assert run("clean", "--older-than", "0s").returncode == 0
    assert is_whole(store)
    remote = queue.home / "snapshots" / f".removed-{name}" / "tree" / "remote"
    notices = json.loads(run("daemon", "status", "--json").stdout)["notices"]
    assert any(f"{remote}: is a mount" in each for each in notices), notices
    unmount(remote)
    run("clean")
    until(lambda: os.listdir(queue.home / "snapshots") == [], "the removal of the snapshot")
    assert is_whole(store)
    assert json.loads(run("daemon", "status", "--json").stdout)["notices"] == []


@attack(
    "mount a folder in a run that `batch` moves",
    now="refused: the run stays, and its mount is named",
)
def test_a_mount_in_a_run_that_is_pruned(place: Path, store: Path, mount: Mount) -> None:
    folder, pruned = place / "out" / RUN, place / "pruned"
    folder.mkdir(parents=True)
    pruned.mkdir()
    mount(folder)
    moved = prune(folder, pruned, place / "out" / "pruned.jsonl", why=WHY, at=AT)
    assert moved.to is None
    assert f"is a mount, which gpuyard leaves alone; unmount it first ({folder}/remote)" in (moved.left or "")
    assert is_whole(store)
    assert os.listdir(folder) == ["remote"]
    assert os.listdir(pruned) == []


@attack(
    "mount a folder below `batches`, and run `gpuyard uninstall`",
    now="refused: it stays, with the folders that hold it, and is named",
)
def test_a_mount_in_what_uninstall_removes(place: Path, store: Path, mount: Mount) -> None:
    batches = place / "state" / "batches"
    batches.mkdir(parents=True)
    mount(batches)
    (batches / "first").write_text("")
    (place / "state" / "last").mkdir()
    state = InstalledFiles(what="state", folder=str(place / "state"), names=("batches", "last"), shown="state")
    [kept] = remove([state])
    assert kept.path == str(batches / "remote")
    assert kept.why.startswith("is a mount")
    assert is_whole(store)
    assert os.listdir(place / "state") == ["batches"]
    assert os.listdir(batches) == ["remote"]


@attack(
    "mount a folder in the folder of outputs, or on the whole folder that is removed",
    now="refused: it stays, and is named",
)
def test_a_mount_in_place_of_the_folder(place: Path, store: Path, mount: Mount) -> None:
    folder = place / "partial"
    folder.mkdir()
    mount(folder)
    problems = [*remove_tree(folder), *remove_tree(folder / "remote")]
    assert {each.filename for each in problems} == {str(folder / "remote")}
    assert is_whole(store)
