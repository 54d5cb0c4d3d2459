"""The directories of a user's files, on disks that only this machine sees. Every command imports it: it imports little.

The queue's database, its locks and its sockets work on one machine only. Where a folder is on a network file system, or
on an unknown one (such as FUSE) that fails a test of locks and of SQLite, a folder on a local disk takes its place:

    /var/lib/gpuyard/UID/NAME       if an administrator made /var/lib/gpuyard with mode 1777
    /var/tmp/gpuyard-UID/NAME       which all systems have, and which is kept when the machine restarts

NAME is a digest of the path that it stands for, without the machine's name, which may change. A folder that exists is
used before a new one is made. Other users can write to the folders above, so all of it is checked (`private_files`). A
test that succeeds does not show that no other machine sees the folder: `client/queue_host.py` guards against that."""

import os
import sys

from gpuyard.errors import EnvironmentFault

MOUNTS = "/proc/self/mountinfo"
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "rootfs", "overlay", "overlayfs", "aufs", "f2fs",
     "bcachefs", "jfs", "reiserfs", "nilfs2", "ecryptfs", "squashfs", "erofs"}
)  # fmt: skip
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "ocfs2", "gfs2"}
)  # fmt: skip


def file_system(folder: str) -> str | None:
    """Return the type of the folder's file system, or None if the system does not list mounts. The folder need not
    exist."""
    device, place = None, folder  # read before the list: an automounter mounts what is on the way
    while device is None:
        try:
            device = os.stat(place).st_dev
        except OSError:
            device = 0 if place in ("/", "") else None
            place = os.path.dirname(place)
    try:
        with open(MOUNTS, "rb", buffering=0) as file:
            mounts = file.read()
    except OSError:
        return None
    at = mounts.find(b" %d:%d " % (os.major(device), os.minor(device)))
    if at >= 0:
        line = mounts[at : mounts.find(b"\n", at)]
        return line.partition(b" - ")[2].partition(b" ")[0].decode()
    # By the longest mount point on the path: btrfs gives each subvolume a device of its own.
    path, best, kind = os.path.realpath(folder), "", None
    for text in mounts.decode("utf-8", "surrogateescape").splitlines():
        head, _, tail = text.partition(" - ")
        mount = [*head.split(" ", 5), *[""] * 5][4]
        for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            mount = mount.replace(escape, character)
        if len(mount) >= len(best) and mount and (path == mount or path.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, tail.partition(" ")[0]
    return kind


_BASES = ("/var/lib/gpuyard/{uid}", "/var/tmp/gpuyard-{uid}")  # noqa: S108 - checked as described above
_PASSED = "passed"
_found: "dict[str, LocalFolder]" = {}


class LocalFolder:
    """`path` is used in place of `wanted`, which is on a file system of the type `kind`. `problem` is the reason, None
    if both are the same."""

    def __init__(self, wanted: str, path: str, kind: str | None, problem: str | None) -> None:
        self.wanted, self.path, self.kind, self.problem = wanted, path, kind, problem


def find_local_folder(wanted: str) -> LocalFolder:
    """Return the folder to use. It stays the same for this process. Raises EnvironmentFault if there is none."""
    if wanted not in _found:
        kind = file_system(wanted)
        problem = sharing_problem(wanted, kind)
        path = wanted if problem is None else _make_instead(wanted, problem)
        _found[wanted] = LocalFolder(wanted, path, kind, problem)
    return _found[wanted]


def sharing_problem(folder: str, kind: str | None = None) -> str | None:
    """Return why the folder, on a file system of this type, must not hold what one machine locks; None if it may."""
    kind = kind or file_system(folder)
    if kind is None or kind in LOCAL:
        return None
    if kind in NETWORK:
        return f"it is on a network file system ({kind})"
    verdict = _test(folder, kind)
    return None if verdict == _PASSED else f"its file system ({kind}) may be shared: {verdict}"


def _test(folder: str, kind: str) -> str:
    """Return `passed`, or why the folder cannot be used. The result of an earlier test counts."""
    from gpuyard.system.private_files import PrivateFileError, make_folder, open_own
    from gpuyard.system.processes import host_name

    record = f"{folder}/file-system.{host_name()}"
    try:
        with open(open_own(record, os.O_RDONLY), encoding="utf-8") as file:
            tested, _, verdict = file.read().strip().partition(": ")
        if tested == kind and verdict:
            return verdict
    except (OSError, PrivateFileError):
        pass
    try:
        make_folder(folder)
        verdict = _run_test(folder)
        with open(open_own(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(f"{kind}: {verdict}\n")
    except OSError:
        return _PASSED  # it cannot be written, which the caller will find and report
    except PrivateFileError as error:
        return _PASSED if isinstance(error.__cause__, OSError) else error.message
    return verdict


def _run_test(folder: str) -> str:
    import subprocess

    command = [sys.executable, "-P", "-m", "gpuyard.store.file_system_check", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    except subprocess.TimeoutExpired:
        return "a test of its locks did not end within 60 s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else "a test of its locks failed"


def _make_instead(wanted: str, problem: str) -> str:
    import hashlib

    from gpuyard.system.private_files import PrivateFileError, check_folder, make_folder

    name = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
    tops, problems = [], []
    for top in (base.format(uid=os.geteuid()) for base in _BASES):
        if os.path.isdir(above := os.path.dirname(top)):
            if (kind := file_system(above)) in (None, *LOCAL):
                tops.append(top)
            else:
                problems.append(f"{above} is on {kind}")
    tops.sort(key=lambda top: not os.path.isdir(f"{top}/{name}"))  # a folder that exists first
    for top in tops:
        try:
            check_folder(top)
            make_folder(f"{top}/{name}")
        except PrivateFileError as error:
            problems.append(error.message)
        else:
            return f"{top}/{name}"
    raise EnvironmentFault(
        f"{wanted} cannot hold a queue: {problem}; and there is no folder on a local disk: "
        f"{'; '.join(problems) or 'there is no /var/tmp'}",
        hint="set XDG_STATE_HOME to a folder on a local disk that is yours alone",
    )


# Directories on local disks, which are used as they are named. That stays the same for this process.
_local: set[str] = set()


def user_directory(variable: str, default: str) -> str:
    """Return `GPUYARD_HOME`, or gpuyard's directory by the XDG rules, or the usual one of macOS. Ignores a relative
    path in the XDG `variable`."""
    home = os.environ.get("GPUYARD_HOME")
    if home:
        home = os.path.expanduser(home)
        return home if os.path.isabs(home) else os.path.join(os.getcwd(), home)
    named = os.environ.get(variable, "").strip()
    if not os.path.isabs(named):
        named = os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else default)
    return os.path.join(named, "gpuyard")


def named_state_directory() -> str:
    """Return the directory for files that must survive a reboot, as the user's settings name it. Other machines may
    share it."""
    return user_directory("XDG_STATE_HOME", "~/.local/state")


def state_directory() -> str:
    """Return the directory that is used for these files: the one that is named, or another on a local disk."""
    named = named_state_directory()
    if named not in _local:
        if file_system(named) not in (None, *LOCAL):
            return find_state_directory().path
        _local.add(named)
    return named


def find_state_directory() -> LocalFolder:
    return find_local_folder(named_state_directory())


def shared_directory() -> str | None:
    """Return the directory of this user that other machines see too, for files that they exchange: the one that is
    named, or the usual one in the home. None if both are on local disks."""
    place = find_state_directory()
    if place.problem is not None:
        return place.wanted
    usual = os.path.expanduser("~/.local/state/gpuyard")
    has_home = bool(os.environ.get("GPUYARD_HOME"))  # then nothing outside it is used
    return None if has_home or file_system(usual) in (None, *LOCAL) else usual
