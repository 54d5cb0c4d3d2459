"""Prepare the ledger's directory, or make a directory that several users share."""

import os
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system.file_systems import NETWORK, file_system

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare_directory(folder: Path) -> Path:
    """Make the directory if it is missing, and return it. Raises EnvironmentFault if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise EnvironmentFault(
            f"the lease directory {folder} cannot be created: {error.strerror}",
            hint="set GPUYARD_LOCK_DIR to another directory",
        ) from error
    kind = file_system(str(folder))
    if kind in NETWORK:
        raise EnvironmentFault(
            f"the lease directory {folder} is on a network file system ({kind}), where locks are not reliable",
            hint="set GPUYARD_LOCK_DIR to a directory on a local disk",
        )
    if not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
        raise EnvironmentFault(
            f"you cannot write to the lease directory {folder}",
            hint="ask its owner for access, or set GPUYARD_LOCK_DIR to another directory",
        )
    check_sticky(folder, status)
    return folder


def check_sticky(folder: Path, status: os.stat_result) -> None:
    """Raise EnvironmentFault if users other than the owner of the directory can remove the files of others in it."""
    if status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise EnvironmentFault(
            f"other users could remove your leases in {folder}: the directory is shared, but not sticky",
            hint=f"run `chmod +t {folder}`, or make a new one with `gpuyard leases init-shared DIR`",
        )


def is_private(folder: Path) -> bool:
    return not folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def restore_directory(folder: Path) -> None:
    """Make a private lease directory again that was removed under a running daemon, unless its parent is gone, too."""
    if not os.path.isdir(folder) and folder.parent.is_dir():  # for each grant: pathlib takes ten times as long
        prepare_directory(folder)


def make_shared_directory(folder: Path, group: int | None = None) -> Path:
    """Make a directory in which all users, or those of a group, see all leases and can remove only their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A mistyped path must not make a home writable by all.
        others = [name for name in os.listdir(folder) if not name.endswith((".lease", ".ticket", ".drain"))]
        if others:
            raise UserError(f"{folder} holds other files, such as {others[0]}", hint="give the path of a new directory")
        if group is not None:
            os.chown(folder, -1, group)
        folder.chmod(0o1777 if group is None else 0o3770)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be made a shared lease directory: {error.strerror}") from error
    return prepare_directory(folder)


def find_closed_parent(folder: Path) -> Path | None:
    """Return the closest parent directory that other users cannot enter."""
    return next((above for above in folder.resolve().parents if not above.stat().st_mode & stat.S_IXOTH), None)
