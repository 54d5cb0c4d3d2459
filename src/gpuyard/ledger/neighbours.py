"""Who else leases the GPUs of this machine, in which directory; said once a day.

Each daemon, `gpuyard run` and GPUScheduler announces its lease directory by a listening unix socket with an abstract
name (Linux). Such a socket is no file and ends with its process. The kernel lists it for all, with the owner, so no
user can speak for another. Nothing connects to it, and no decision depends on it: commands only print that users have
different directories. Processes in another network namespace, as in most containers, do not see it.

The name is `gpuyard-leases/GPUS/DIRECTORY/PROCESS/PATH`: which GPUs (simulated ones are those of a folder), the device
and inode of the directory, pid and a number, and as much of the path as fits.
"""

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

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_LISTENING = 1 << 10
_SHOW_NAME, _SHOW_UID = 0x01, 0x40
_NAME, _UID = 0, 7
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, pid
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_BEFORE_ATTRIBUTES = _HEADER.size + 16
_QUERY = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _LISTENING, 0, _SHOW_NAME | _SHOW_UID, 0, 0)
_BUFFER = 1 << 16
_TIMEOUT_S = 1.0
# Any user can open thousands.
_MAX_READ = 8 << 20


def listening_sockets() -> Iterator[tuple[bytes, int]]:
    """Yield the names of listening abstract sockets, each with its user. Raises OSError if the kernel does not say."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(_QUERY), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0) + _QUERY)
        read = 0
        while read < _MAX_READ:
            replies = kernel.recv(_BUFFER)
            read += len(replies)
            while replies:
                length, kind, *_ = _HEADER.unpack_from(replies)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (error,) = struct.unpack_from("=i", replies, _HEADER.size)
                    raise OSError(-error, "the kernel does not list unix sockets")
                found = dict(_attributes(replies[_BEFORE_ATTRIBUTES:length]))
                name, uid = found.get(_NAME, b""), found.get(_UID)
                if name.startswith(b"\0") and uid is not None:
                    yield name[1:], int.from_bytes(uid, sys.byteorder)
                replies = replies[_aligned(length) :]


def _attributes(text: bytes) -> Iterator[tuple[int, bytes]]:
    while len(text) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(text)
        yield kind, text[_ATTRIBUTE.size : length]
        text = text[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3


_PREFIX = "gpuyard-leases/"
_LONGEST_NAME = 106
_MOST_ANNOUNCED = 8  # by one process; the oldest ends
_PROPOSED = "/var/lib/gpuyard-leases"

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


def describe(neighbours: list[Neighbour], folder: Path) -> str | None:
    """Return one line about users with other lease directories, and how to share one; None without any."""
    if not neighbours:
        return None
    first = neighbours[0]
    more = f" and {format_count(len(neighbours) - 1, 'other user')}" if len(neighbours) > 1 else ""
    process = f" (pid {first.pid})" if first.pid else ""
    return (
        f"{first.user}{process}{more} and you lease the same GPUs in different directories, {first.directory} and "
        f"{folder}, and may both get the same GPU; to share: {_how_to_share(neighbours, folder)}"
    )


def _how_to_share(neighbours: list[Neighbour], folder: Path) -> str:
    shared = next((each.directory for each in neighbours if each.is_usable), None)
    if shared is not None:
        return f"`export GPUYARD_LOCK_DIR={shared}`"
    if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
        return f"they run `export GPUYARD_LOCK_DIR={folder}`"
    return f"`sudo gpuyard leases init-shared {_PROPOSED}`, then all users `export GPUYARD_LOCK_DIR={_PROPOSED}`"


def _name(folder: Path) -> str:
    """Return the name without process and path: equal for all processes with these GPUs and this directory."""
    gpus = "gpus"
    if simulated_devices() is not None:
        gpus = hashlib.blake2b(os.fsencode(state_dir() / "simulated"), digest_size=6).hexdigest()
    return f"{_PREFIX}{gpus}/{_identity(folder)}"


def _neighbour(name: str, uid: int) -> Neighbour:
    _, _, identity, process, directory = (*name.split("/", 4), "", "", "", "")[:5]
    return Neighbour(
        uid=uid,
        user=user_name(uid),
        pid=_process_of(uid, process.partition("-")[0]),
        directory=printable(directory, _LONGEST_NAME) or "another",
        is_usable=directory.isprintable() and _is_usable(directory, identity),
    )


def _process_of(uid: int, pid: str) -> int | None:
    """Return the pid that a name states, if that process belongs to this user."""
    try:
        return int(pid) if os.stat(f"/proc/{int(pid)}").st_uid == uid else None
    except (OSError, ValueError):
        return None


def _is_usable(directory: str, identity: str) -> bool:
    """Whether this user can share the directory, and can trust its owner: root."""
    if _identity(directory) != identity or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return False
    status = os.stat(directory)
    return bool(status.st_mode & stat.S_ISVTX) and status.st_uid == 0


def _identity(directory: str | Path) -> str:
    try:
        status = os.stat(directory)
    except OSError:
        return "none"
    return f"{status.st_dev:x}-{status.st_ino:x}"


# The file's time is when to look again. That way most commands only ask for a file's time.
_STAMP = "neighbours-checked"
_LOOK_AGAIN_S, _SAY_AGAIN_S = 3600.0, 86400.0


def due_note(folder: Path) -> str | None:
    """Return a line if another user has another lease directory than `folder`, and that was not said today."""
    now, stamp = time.time(), state_dir() / _STAMP
    with contextlib.suppress(OSError):
        if now < stamp.stat().st_mtime <= now + _SAY_AGAIN_S:
            return None
    line = describe(find_neighbours(folder), folder)
    with contextlib.suppress(OSError, PrivateFileError):  # then it is said again
        make_folder(str(stamp.parent))
        descriptor = open_own(str(stamp), os.O_WRONLY | os.O_CREAT)
        due = now + (_LOOK_AGAIN_S if line is None else _SAY_AGAIN_S)
        os.utime(descriptor, (due, due))
        os.close(descriptor)
    return line
