"""Prepare the ledger's directory, or make a directory that several users share."""

import os
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault, UserError

# On these file systems a lock may not be visible to all machines that see the file.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "ocfs2", "gfs2"}
)  # fmt: skip
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare_directory(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Path:
    """Make the directory if it is missing, and return it. Raises EnvironmentFault if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise EnvironmentFault(
            f"the lease directory {folder} cannot be created: {error.strerror}",
            hint="set GPUYARD_LOCK_DIR to another directory",
        ) from error
    kind = network_file_system(folder, mountinfo)
    if kind is not None:
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


def network_file_system(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the directory's file system if it is a network file system."""
    kind = file_system(folder, mountinfo)
    return kind if kind in _NETWORK else None


def file_system(folder: Path, mountinfo: Path) -> str | None:
    """Return the type of the directory's file system, or None if the system does not list mounts."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = os.path.realpath(folder)
    best, kind = "", None
    for line in lines:
        head, _, tail = line.partition(" - ")
        mount = head.split(" ")[4] if head.count(" ") >= 5 else ""
        mount = mount.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if mount and len(mount) >= len(best) and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, tail.split(" ")[0]
    return kind
