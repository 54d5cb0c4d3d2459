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
    path = os.path.realpath(folder)  # before the list is read: an automounter mounts what is on the way
    try:
        with open(MOUNTS, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    best, kind = "", None
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields = head.split(" ", 5)
        mount = fields[4] if len(fields) > 5 else ""
        if "\\" in mount:
            for escape, character in _ESCAPES:
                mount = mount.replace(escape, character)
        if len(mount) >= len(best) and mount and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, tail.partition(" ")[0]
    return kind
