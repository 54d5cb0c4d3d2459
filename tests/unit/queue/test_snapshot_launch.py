"""Attempts are launched in the snapshot of their code, with paths of the tree mapped to it."""

from pathlib import Path

from gpuyard.model.container import Container, Mount
from gpuyard.model.job_spec import CodeSnapshot, changed_script_text, commit_text
from gpuyard.ports import Launch
from gpuyard.queue.launch_jobs import in_snapshot


def snapshot_of(tmp_path: Path) -> CodeSnapshot:
    folder = tmp_path / "snapshot"
    (folder / "src").mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "data").symlink_to(tmp_path / "project" / "data")
    return CodeSnapshot(name="a" * 16, folder=str(folder), root=str(tmp_path / "project"), cwd=f"{folder}/src")


def launch(*command: str, container: Container | None = None, **environment: str) -> Launch:
    return Launch(job_id=1, attempt=1, command=command, cwd="/x", environment=environment, container=container)


def test_copied_files_and_folders_of_the_tree_are_those_of_the_snapshot(tmp_path: Path) -> None:
    snapshot, root = snapshot_of(tmp_path), str(tmp_path / "project")
    command = ("python", f"{root}/train.py", f"{root}/data", f"{root}/runs", "train.py", f"--x={root}/train.py")
    found = in_snapshot(launch(*command, PYTHONPATH=f"{root}/src:/opt/lib", PWD=root), snapshot)
    folder = snapshot.folder
    assert found.command == ("python", f"{folder}/train.py", *command[2:])
    assert found.cwd == found.environment["PWD"] == f"{folder}/src"
    assert found.environment["PYTHONPATH"] == f"{folder}/src:/opt/lib"
    assert found.snapshot == snapshot


def test_a_container_has_the_snapshot_and_the_tree_once_each(tmp_path: Path) -> None:
    snapshot, root = snapshot_of(tmp_path), str(tmp_path / "project")
    mounted = Mount(source="/data", target=root)
    for given, expected in (((), [snapshot.folder, root]), ((mounted,), [snapshot.folder, root])):
        container = Container(image="i", mounts=given, tool="podman")
        found = in_snapshot(launch("true", container=container), snapshot).container
        assert found is not None
        assert [mount.target for mount in found.mounts] == expected
        assert set(given) <= set(found.mounts)


def test_a_path_beside_the_tree_is_not_in_the_snapshot(tmp_path: Path) -> None:
    snapshot = snapshot_of(tmp_path)
    assert snapshot.inside(f"{snapshot.root}-other/train.py") is None
    assert snapshot.inside(f"{snapshot.root}/../project/train.py") == f"{snapshot.folder}/train.py"
    assert snapshot.inside(snapshot.root) == snapshot.folder


def test_texts_about_the_code() -> None:
    assert commit_text("1a2b3c4d5e6f", is_dirty=True) == "commit 1a2b3c4d5e, with uncommitted changes"
    assert commit_text("1a2b3c4d5e6f", is_dirty=None) == "commit 1a2b3c4d5e"
    assert commit_text(None, is_dirty=False) is None
    assert changed_script_text("/p/train.py", is_changed=None, attempts=(), is_over=False) is None
    ended = changed_script_text("/p/train.py", is_changed=False, attempts=(1, 3), is_over=True)
    assert ended == "the script train.py has changed since it was submitted: attempts 1, 3 ran the changed one"
