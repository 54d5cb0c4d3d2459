"""The ledger's directory: where it is, whether it can be trusted, and how one for several users is made."""

import os
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.leases.ledger_mutex import MUTEX

# A lock on a file of another machine's is not known to all who see the file.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "ocfs2", "gfs2"}
)  # fmt: skip
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Path:
    """Makes the directory where there is none, or says why it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise EnvironmentFault(
            f"the lease directory {folder} cannot be made: {error.strerror}",
            hint="name another with GPUYARD_LOCK_DIR",
        ) from error
    kind = network_file_system(folder, mountinfo)
    if kind is not None:
        raise EnvironmentFault(
            f"the lease directory {folder} is on a network file system ({kind}), where locks are not kept reliably",
            hint="name one on a local disk with GPUYARD_LOCK_DIR",
        )
    if not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
        raise EnvironmentFault(
            f"the lease directory {folder} is not writable by you",
            hint="ask its owner for access, or name another with GPUYARD_LOCK_DIR",
        )
    if status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise EnvironmentFault(
            f"in the lease directory {folder} others could remove your leases: it is shared, but not sticky",
            hint=f"chmod +t {folder}, or make one with `gpuyard leases init-shared DIR`",
        )
    return folder


def make_shared(folder: Path, group: int | None = None) -> Path:
    """A directory in which all users, or those of a group, see each other's leases and can remove only their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_used(folder)
        if group is not None:
            os.chown(folder, -1, group)
        folder.chmod(0o1777 if group is None else 0o3770)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be made a shared lease directory: {error.strerror}") from error
    return prepare(folder)


def _refuse_used(folder: Path) -> None:
    """A home or a project must not become writable by all because of a slip."""
    strange = [name for name in os.listdir(folder) if name != MUTEX and not name.endswith((".lease", ".ticket"))]
    if strange:
        raise UserError(f"{folder} holds other things, such as {strange[0]}", hint="name a new directory")


def shut_above(folder: Path) -> Path | None:
    """The first folder on the way that keeps other users out."""
    return next((above for above in folder.resolve().parents if not above.stat().st_mode & stat.S_IXOTH), None)


def network_file_system(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of file system, where it is one that other machines have a part in."""
    kind = file_system(folder, mountinfo)
    return kind if kind in _NETWORK else None


def file_system(folder: Path, mountinfo: Path) -> str | None:
    """The kind of the mount that holds the directory, where the system tells."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    place = os.path.realpath(folder)
    best, kind = "", None
    for line in lines:
        head, _, tail = line.partition(" - ")
        mount = _unescape(head.split(" ")[4]) if head.count(" ") >= 5 else ""
        if mount and len(mount) >= len(best) and (place == mount or place.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, tail.split(" ")[0]
    return kind


def _unescape(mount: str) -> str:
    return mount.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
