"""How an attempt is launched in the snapshot of its code."""

import os
import stat

from msgspec.structs import replace

from gpuyard.core.job.code_record import CodeSnapshot
from gpuyard.core.job.container import Container, Mount
from gpuyard.core.job.job import JobSpec
from gpuyard.ports import Launch

# A job that was submitted from inside another job must not inherit these.
CODE_VARIABLES = ("GPUYARD_SUBMIT_DIR", "GPUYARD_SNAPSHOT", "GPUYARD_COMMIT")


def code_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables that say where the job was submitted, where its code is, and which commit that was."""
    found = {"GPUYARD_SUBMIT_DIR": spec.cwd}
    if spec.code.snapshot is not None:
        found["GPUYARD_SNAPSHOT"] = spec.code.snapshot.folder
    if spec.code.commit is not None:
        found["GPUYARD_COMMIT"] = spec.code.commit
    return found


def in_snapshot(launch: Launch, snapshot: CodeSnapshot) -> Launch:
    """Return the launch with its working directory in the snapshot. Whole arguments that are files of the tree, and
    folders of PYTHONPATH, become those of the snapshot. A container gets both the snapshot and the tree."""
    environment = {**launch.environment, "PWD": snapshot.cwd}
    if python_path := environment.get("PYTHONPATH"):
        folders = (_copied(each, snapshot, stat.S_IFDIR) for each in python_path.split(":"))
        environment["PYTHONPATH"] = ":".join(folders)
    return replace(
        launch,
        command=tuple(_copied(word, snapshot, stat.S_IFREG) for word in launch.command),
        cwd=snapshot.cwd,
        environment=environment,
        container=None if launch.container is None else _with_tree(launch.container, snapshot),
        snapshot=snapshot,
    )


def _copied(path: str, snapshot: CodeSnapshot, kind: int) -> str:
    """Return where an absolute path is in the snapshot, if it was copied there; else the path itself."""
    place = snapshot.inside(path) if path.startswith("/") else None
    try:
        return path if place is None or stat.S_IFMT(os.lstat(place).st_mode) != kind else place
    except (OSError, ValueError):
        return path


def _with_tree(container: Container, snapshot: CodeSnapshot) -> Container:
    """Mount the snapshot, and the tree that its links lead to."""
    given = {mount.target for mount in container.mounts}
    folders = [each for each in (snapshot.folder, snapshot.root) if each not in given]
    mounts = tuple(Mount(source=each, target=each) for each in folders)
    return replace(container, mounts=(*mounts, *container.mounts))
