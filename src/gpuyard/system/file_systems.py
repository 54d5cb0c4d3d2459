"""The type of a folder's file system, and whether other machines may see the same files.

- *Local*: the file systems of disks and of memory.
- *Network*: made to be seen by several machines. Locks may hold on one machine only, and SQLite's shared memory does.
- *Unknown*: all others, with those in user space (FUSE). `system/local_folder.py` tests them.

It imports little, because every command imports it.
"""

import os

MOUNTS = "/proc/self/mountinfo"
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "rootfs", "overlay", "overlayfs", "aufs", "f2fs",
     "bcachefs", "jfs", "reiserfs", "nilfs2", "ecryptfs", "squashfs", "erofs"}
)  # fmt: skip
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "ocfs2", "gfs2"}
)  # fmt: skip
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def file_system(folder: str) -> str | None:
    """Return the type of the folder's file system, or None if the system does not list mounts. The folder need not
    exist."""
    device = _device(folder)  # before the list is read: an automounter mounts what is on the way
    mounts = _read_mounts()
    if mounts is None:
        return None
    at = mounts.find(b" %d:%d " % (os.major(device), os.minor(device)))
    if at >= 0:
        line = mounts[at : mounts.find(b"\n", at)]
        return line.partition(b" - ")[2].partition(b" ")[0].decode()
    return _by_path(os.path.realpath(folder), mounts)


def _device(folder: str) -> int:
    """Return the device of the folder, or of the nearest one above that exists."""
    while True:
        try:
            return os.stat(folder).st_dev
        except OSError:
            if folder in ("/", ""):
                return 0
            folder = os.path.dirname(folder)


def _read_mounts() -> bytes | None:
    try:
        file = os.open(MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = b""
        while part := os.read(file, 1 << 16):
            content += part
        return content
    finally:
        os.close(file)


def _by_path(path: str, mounts: bytes) -> str | None:
    """Return the type by the longest mount point on the path: btrfs gives each subvolume a device of its own."""
    best, kind = "", None
    for line in mounts.decode("utf-8", "surrogateescape").splitlines():
        head, _, tail = line.partition(" - ")
        fields = head.split(" ", 5)
        mount = fields[4] if len(fields) > 5 else ""
        for escape, character in _ESCAPES:
            mount = mount.replace(escape, character)
        if len(mount) >= len(best) and mount and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, tail.partition(" ")[0]
    return kind
