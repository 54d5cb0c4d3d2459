"""The daemon's unix socket: a file that only its user can open, in a directory that only its user can write to.

Every response on it carries the daemon's version, and a request may demand a minimum version.
"""

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from gpuyard.connect.fast_http import AT_LEAST_FIELD, TOO_OLD, VERSION_FIELD
from gpuyard.connect.paths import reach
from gpuyard.core.version_mismatch import is_newer
from gpuyard.daemon.server.http_parser import Headers, HttpError, Request
from gpuyard.errors import EnvironmentFault
from gpuyard.version import __version__

COMMON_HEADERS: Headers = ((VERSION_FIELD, __version__),)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_if_too_old(request: Request) -> bool:
    """Refuse a request that demands a newer daemon than this one, before anything is done. Otherwise return True."""
    wanted = request.headers.get(AT_LEAST_FIELD.lower(), __version__)
    if wanted != __version__ and is_newer(wanted, __version__):
        raise HttpError(
            TOO_OLD,
            f"the daemon is version {__version__}, but the request needs at least {wanted[:100]}",
            hint="`gpuyard daemon restart` (running jobs go on)",
        )
    return True


def refuse_other_users(connection: socket.socket) -> str | None:
    """Return why the client is refused, or None. Without SO_PEERCRED only the mode of the socket file protects us."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return None if uid in (os.getuid(), 0) else "this daemon belongs to another user"


def bind(path: Path) -> socket.socket:
    """The umask gives the file its mode: with chmod after bind, others could open it for a moment."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _prepare(path)
        umask = os.umask(0o177)
        try:
            reach(str(path), listening.bind)
        finally:
            os.umask(umask)
    except (OSError, EnvironmentFault) as error:
        listening.close()
        if isinstance(error, EnvironmentFault):
            raise
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be created: {error.strerror or error}",
            hint="set GPUYARD_HOME to another directory",
        ) from error
    return listening


def _prepare(path: Path) -> None:
    """Create the directory, check that other users cannot put a socket into it, and remove a dead daemon's socket."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    is_open_to_others = folder.st_mode & _WRITABLE_BY_OTHERS and not folder.st_mode & stat.S_ISVTX
    if is_open_to_others or folder.st_uid not in (os.getuid(), 0):
        raise EnvironmentFault(
            f"other users can write to {path.parent} and could replace the daemon's socket",
            hint=f"chmod go-w {path.parent}, or set GPUYARD_HOME to a directory of your own",
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EnvironmentFault(f"{path} exists and is not a socket", hint="move it away")
        path.unlink()
