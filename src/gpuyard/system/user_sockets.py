"""Unix sockets between processes of one user. All connections to daemons, keepers and tasks are made here.

Before we connect, the socket's folder must be this user's. Before a byte is sent, the kernel says which user listens:
it must be this user or root. A socket that we make can be opened by this user only; a process that accepts a connection
calls `is_same_user`. It imports little, because every command imports it."""

import _socket
import os
import stat
import sys

from gpuyard.errors import EnvironmentFault
from gpuyard.system.private_files import PrivateFileError, check_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

# Level, option and size of the peer's credentials. The user follows the first four bytes: the pid in Linux's `ucred`,
# the version in the `xucred` of macOS and FreeBSD (SOL_LOCAL, LOCAL_PEERCRED).
_CREDENTIALS = (_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12) if hasattr(_socket, "SO_PEERCRED") else (0, 0x001, 76)


def connect(path: str, timeout_s: float | None = None) -> "_socket.socket":
    """Return a connection to a socket of this user. Raises OSError if it cannot be reached within `timeout_s`, and
    PrivateFileError if it is or could be another user's."""
    check_folder(os.path.dirname(path))
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        reach(path, connection.connect)
        if not is_same_user(connection):
            raise PrivateFileError(
                f"another user (uid {peer_uid(connection)}) listens at {path}: nothing was sent",
                hint="remove it, or set GPUYARD_HOME to another folder",
            )
    except BaseException:
        connection.close()
        raise
    return connection


def bind(path: str) -> "socket.socket":
    """Return a socket bound to a path in this user's folder, in place of a dead process's socket. Raises OSError, and
    PrivateFileError if the folder is not this user's alone. The umask gives the file its mode: with chmod after bind,
    others could open it for a moment."""
    import socket

    check_folder(os.path.dirname(path))
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise PrivateFileError(f"{path} exists and is not a socket", hint="move it away")
        os.unlink(path)
    except FileNotFoundError:
        pass
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        reach(path, listening.bind)
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(umask)
    return listening


def peer_uid(connection: "_socket.socket") -> int | None:
    """Return the user of the process at the other end, as it was when it connected or began to listen; None if the
    system does not say."""
    try:
        credentials = connection.getsockopt(*_CREDENTIALS)
    except OSError:
        return None
    return int.from_bytes(credentials[4:8], sys.byteorder)


def peer_pid(connection: "_socket.socket") -> int | None:
    """Return the pid of the process that listens at the other end of a unix socket; None if the system cannot tell."""
    if connection.family != _socket.AF_UNIX or not hasattr(_socket, "SO_PEERCRED"):
        return None
    return int.from_bytes(connection.getsockopt(*_CREDENTIALS)[:4], sys.byteorder) or None


def is_same_user(connection: "_socket.socket") -> bool:
    """Return whether the other end is this user or root. If the system does not say, only the modes of the folder and
    of the socket protect us."""
    return peer_uid(connection) in (os.geteuid(), 0, None)


def reach(path: str, act: "Callable[[str], object]") -> None:
    """Call `act`, bind or connect, with a name for `path` that fits into a socket address."""
    if len(os.fsencode(path)) <= 100:  # an address holds 108 bytes on Linux and 104 on macOS
        act(path)
        return
    if sys.platform != "linux":
        hint = "name a folder with a shorter path with GPUYARD_HOME"
        raise EnvironmentFault(f"the path {path} is too long for a socket", hint=hint)
    above, name = os.path.split(path)
    folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
