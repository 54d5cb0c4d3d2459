"""The daemon's unix socket: a file that only its user can open, in a directory that only its user can write to.

Every response on it carries the daemon's version, and a request may demand a minimum version.
"""

import socket
from pathlib import Path

from gpuyard.connect.fast_http import AT_LEAST_FIELD, TOO_OLD, VERSION_FIELD
from gpuyard.core.version_mismatch import is_newer
from gpuyard.daemon.server.http_parser import Headers, HttpError, Request
from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.system.private_files import make_folder
from gpuyard.version import __version__

COMMON_HEADERS: Headers = ((VERSION_FIELD, __version__),)


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
    """Return why the client is refused, or None."""
    return None if user_sockets.is_same_user(connection) else "this daemon belongs to another user"


def bind(path: Path) -> socket.socket:
    try:
        make_folder(str(path.parent))
        return user_sockets.bind(str(path))
    except OSError as error:
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be created: {error.strerror or error}",
            hint="set GPUYARD_HOME to another directory",
        ) from error


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
