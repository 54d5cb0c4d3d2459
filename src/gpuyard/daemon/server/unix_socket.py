"""The daemon's own socket: a file that only its user can reach, in a folder that nobody else can put anything into.

Every answer on it has the daemon's version, and a request may ask for a daemon of at least some version.
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
from gpuyard.daemon.server.http_parser import Fields, HttpError, Request
from gpuyard.errors import EnvironmentFault
from gpuyard.version import __version__

FIELDS: Fields = ((VERSION_FIELD, __version__),)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_if_too_old(request: Request) -> None:
    """Refuse a request that asks for a newer daemon than this one, before anything is done."""
    wanted = request.headers.get(AT_LEAST_FIELD.lower(), __version__)
    if wanted != __version__ and is_newer(wanted, __version__):
        raise HttpError(
            TOO_OLD,
            f"the daemon is version {__version__}, and at least {wanted[:100]} was asked for",
            hint="`gpuyard daemon restart` (running jobs go on)",
        )


def refuse_other_users(connection: socket.socket) -> str | None:
    """Where the system tells who called; elsewhere the file's mode has to do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", told)
    return None if uid in (os.getuid(), 0) else "this daemon is another user's"


def bind(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear_way(path)
        _bind_for_this_user(listening, path)
    except OSError as error:
        listening.close()
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be made: {error.strerror or error}",
            hint="name another folder with GPUYARD_HOME",
        ) from error
    except EnvironmentFault:
        listening.close()
        raise
    return listening


def _bind_for_this_user(listening: socket.socket, path: Path) -> None:
    """The file must not be open to others for a single moment, and the umask is what gives it its mode."""
    umask = os.umask(0o177)
    try:
        reach(str(path), listening.bind)
    finally:
        os.umask(umask)


def _clear_way(path: Path) -> None:
    """A folder that nobody else can put a socket of theirs into, and no dead daemon's socket in it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    is_open_to_others = folder.st_mode & _WRITABLE_BY_OTHERS and not folder.st_mode & stat.S_ISVTX
    if is_open_to_others or folder.st_uid not in (os.getuid(), 0):
        raise EnvironmentFault(
            f"in {path.parent} others could put a socket of theirs in the daemon's place",
            hint=f"chmod go-w {path.parent}, or name a folder of your own with GPUYARD_HOME",
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EnvironmentFault(f"{path} is in the way: it is no socket", hint="move it away")
        path.unlink()
