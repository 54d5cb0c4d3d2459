"""Who else leases the GPUs of this machine, in which directory; said once a day.

Each daemon, `gpuyard run` and GPUScheduler announces its lease directory by a listening unix socket with an abstract
name (Linux), which ends with its process. The kernel lists it with its owner, so no user can speak for another. Nothing
connects to it, and no decision depends on it. Another network namespace, as in most containers, does not see it. The
name is `gpuyard-leases/GPUS/DIRECTORY/PROCESS/PATH`: which GPUs (simulated ones are those of a folder), the device and
inode of the directory, pid and a number, and as much of the path as fits."""

import contextlib
import hashlib
import itertools
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.config import simulated_devices, state_dir
from gpuyard.model.printable_text import printable
from gpuyard.model.units import format_count
from gpuyard.system.private_files import PrivateFileError, make_folder, open_own
from gpuyard.system.processes import user_name


def listening_sockets() -> Iterator[tuple[bytes, int]]:
    """Yield the names of listening abstract sockets with their users, by sock_diag of Linux. Raises OSError."""
    header = struct.Struct("=IHHII")  # length, type, flags, number, pid
    # Sockets in the state LISTEN (10); of each its name (UDIAG_SHOW_NAME) and its user (UDIAG_SHOW_UID).
    query = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 1 << 10, 0, 0x01 | 0x40, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(1.0)
        # SOCK_DIAG_BY_FAMILY, with NLM_F_REQUEST and NLM_F_DUMP
        kernel.send(header.pack(header.size + len(query), 20, 0x1 | 0x300, 1, 0) + query)
        read = 0
        while read < 8 << 20:  # any user can open thousands
            replies = kernel.recv(1 << 16)
            read += len(replies)
            while replies:
                length, kind, *_ = header.unpack_from(replies)
                if kind == 3:  # NLMSG_DONE
                    return
                if kind == 2:  # NLMSG_ERROR
                    (error,) = struct.unpack_from("=i", replies, header.size)
                    raise OSError(-error, "the kernel does not list unix sockets")
                found, rest = dict[int, bytes](), replies[header.size + 16 : length]
                while len(rest) >= 4:
                    size, attribute = struct.unpack_from("=HH", rest)
                    found[attribute], rest = rest[4:size], rest[_aligned(size) :]
                name, uid = found.get(0, b""), found.get(7)  # UNIX_DIAG_NAME, UNIX_DIAG_UID
                if name.startswith(b"\0") and uid is not None:
                    yield name[1:], int.from_bytes(uid, sys.byteorder)
                replies = replies[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3


_LONGEST_NAME = 106
_MOST_ANNOUNCED = 8  # by one process; the oldest ends

_announced: dict[str, int] = {}  # descriptors, which stay open
_number = itertools.count()


class Neighbour(Struct, frozen=True, kw_only=True):
    """A process of another user with another lease directory. `directory` may be cut off, and names any text."""

    uid: int
    user: str
    pid: int | None
    directory: str
    is_usable: bool = False


def announce(folder: Path) -> None:
    """Announce until this process ends that it leases GPUs in this directory, where the system has such sockets."""
    with contextlib.suppress(OSError):
        start = _name(folder)
        if sys.platform != "linux" or start in _announced:
            return
        name = os.fsencode(f"{start}/{os.getpid()}-{next(_number)}/{folder}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(b"\0" + name[:_LONGEST_NAME])
            listening.listen()
            _announced[start] = listening.detach()
        if len(_announced) > _MOST_ANNOUNCED:
            os.close(_announced.pop(next(iter(_announced))))


def find_neighbours(folder: Path) -> list[Neighbour]:
    """Return one process of each other user that leases the same GPUs in another directory. Root counts as a user."""
    found: dict[int, Neighbour] = {}
    if sys.platform != "linux":
        return []
    with contextlib.suppress(OSError):  # a kernel without a list of sockets
        mine = _name(folder)
        gpus = mine.rpartition("/")[0] + "/"
        for encoded, uid in listening_sockets():
            name = encoded.decode("utf-8", "surrogateescape")
            if name.startswith(gpus) and not name.startswith(f"{mine}/") and uid not in {os.geteuid(), *found}:
                found[uid] = _neighbour(name, uid)
    return [found[uid] for uid in sorted(found)]


def _neighbour(name: str, uid: int) -> Neighbour:
    _, _, identity, process, directory = (*name.split("/", 4), "", "", "", "")[:5]
    pid, is_usable = None, False
    with contextlib.suppress(OSError, ValueError):  # a name may state any pid
        stated = int(process.partition("-")[0])
        pid = stated if os.stat(f"/proc/{stated}").st_uid == uid else None
    if (
        directory.isprintable()
        and _identity(directory) == identity
        and os.access(directory, os.R_OK | os.W_OK | os.X_OK)
    ):
        status = os.stat(directory)
        is_usable = bool(status.st_mode & stat.S_ISVTX) and status.st_uid == 0  # its owner can be trusted
    shown = printable(directory, _LONGEST_NAME) or "another"
    return Neighbour(uid=uid, user=user_name(uid), pid=pid, directory=shown, is_usable=is_usable)


def describe(neighbours: list[Neighbour], folder: Path) -> str | None:
    """Return one line about users with other lease directories, and how to share one; None without any."""
    if not neighbours:
        return None
    first = neighbours[0]
    more = f" and {format_count(len(neighbours) - 1, 'other user')}" if len(neighbours) > 1 else ""
    process = f" (pid {first.pid})" if first.pid else ""
    shared = next((each.directory for each in neighbours if each.is_usable), None)
    if shared is not None:
        remedy = f"`export GPUYARD_LOCK_DIR={shared}`"
    elif folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
        remedy = f"they run `export GPUYARD_LOCK_DIR={folder}`"
    else:
        new = "/var/lib/gpuyard-leases"
        remedy = f"`sudo gpuyard leases init-shared {new}`, then all users `export GPUYARD_LOCK_DIR={new}`"
    return (
        f"{first.user}{process}{more} and you lease the same GPUs in different directories, {first.directory} and "
        f"{folder}, and may both get the same GPU; to share: {remedy}"
    )


def _name(folder: Path) -> str:
    """Return the name without process and path: equal for all processes with these GPUs and this directory."""
    gpus = "gpus"
    if simulated_devices() is not None:
        gpus = hashlib.blake2b(os.fsencode(state_dir() / "simulated"), digest_size=6).hexdigest()
    return f"gpuyard-leases/{gpus}/{_identity(folder)}"


def _identity(directory: str | Path) -> str:
    try:
        status = os.stat(directory)
    except OSError:
        return "none"
    return f"{status.st_dev:x}-{status.st_ino:x}"


def due_note(folder: Path) -> str | None:
    """Return a line if another user has another lease directory than `folder`, and that was not said today."""
    # The file's time is when to look again: in an hour, or a day after it was said.
    now, stamp, day_s = time.time(), state_dir() / "neighbours-checked", 86400.0
    with contextlib.suppress(OSError):
        if now < stamp.stat().st_mtime <= now + day_s:
            return None
    line = describe(find_neighbours(folder), folder)
    with contextlib.suppress(OSError, PrivateFileError):  # then it is said again
        make_folder(str(stamp.parent))
        descriptor = open_own(str(stamp), os.O_WRONLY | os.O_CREAT)
        due = now + (3600.0 if line is None else day_s)
        os.utime(descriptor, (due, due))
        os.close(descriptor)
    return line
