"""The code of a submission, as the commands that submit send it: what is recorded of it, and its snapshot."""

import os

from gpuyard.connect.submitted_code import code_of
from gpuyard.errors import UserError
from gpuyard.system.user_directories import user_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Set for a job that runs in a snapshot.
_IN_SNAPSHOT = "GPUYARD_SNAPSHOT"


def record_code(command: "Sequence[str]", cwd: str, *, wants_snapshot: bool | None) -> "tuple[str, dict[str, Any]]":
    """Return the working directory, and the fields of a `CodeRecord`; with a snapshot if one is wanted.

    wants_snapshot: None: as `[submit]` says. A job that runs in a snapshot submits jobs that run in the same one.
    """
    inherited = _inherited(cwd)
    if inherited is not None:
        cwd, snapshot = inherited
        code = code_of(command, cwd)
        return cwd, code if wants_snapshot is False else {**code, "snapshot": snapshot}
    code = code_of(command, cwd)
    if not wants_snapshot and (wants_snapshot is False or not _is_configured()):
        return cwd, code
    from gpuyard.connect.submit_settings import read_submit_settings

    settings = read_submit_settings()
    if wants_snapshot is None and not settings.is_default:
        return cwd, code
    from gpuyard.connect.code_snapshot import take_snapshot
    from gpuyard.system.private_files import make_folder

    make_folder(settings.folder, is_closed=True)
    return cwd, {**code, "snapshot": take_snapshot(cwd, settings.folder, settings.limits)}


class RemovedIfRefused:
    """Removes the snapshot if the daemon refuses the submission in this `with` block. Otherwise it may have jobs."""

    def __init__(self, code: "dict[str, Any]") -> None:
        self._snapshot = code.get("snapshot")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: "type[BaseException] | None", *_: object) -> None:
        snapshot = self._snapshot
        if snapshot is None or kind is None or not issubclass(kind, UserError):
            return
        if snapshot["folder"] != os.environ.get(_IN_SNAPSHOT):
            from gpuyard.connect.code_snapshot import remove_snapshot

            remove_snapshot(os.path.dirname(snapshot["folder"]))


def _is_configured() -> bool:
    """Whether the configuration may ask for snapshots. Parsing it takes longer than the rest of a submission."""
    try:
        with open(f"{user_directory('XDG_CONFIG_HOME', '~/.config')}/config.toml", "rb") as file:
            return b"snapshot" in file.read()
    except OSError:
        return False


def _inherited(cwd: str) -> "tuple[str, dict[str, str]] | None":
    """Return the place in the tree, and the snapshot, of a working directory in the snapshot of the job we run in."""
    folder = os.environ.get(_IN_SNAPSHOT)
    if folder is None or not (cwd == folder or cwd.startswith(f"{folder}/")):
        return None
    from gpuyard.system.snapshot_files import FILES, read_listing

    above = os.path.dirname(folder)
    try:
        root, _ = read_listing(f"{above}/{FILES}")
    except OSError:
        return None
    snapshot = {"name": os.path.basename(above), "folder": folder, "root": root, "cwd": cwd}
    return root + cwd.removeprefix(folder), snapshot
