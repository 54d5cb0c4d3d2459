"""The token of the web page, in a file that only its user can read, so that open pages survive a daemon restart."""

import os
import re
import secrets
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.system.atomic_files import write_atomically

_SHAPE = re.compile(r"[A-Za-z0-9_-]{32,}")


def read_token(path: Path) -> str:
    """Return the stored token; make a new one if there is none, it is malformed, or others could have read it."""
    try:
        with path.open(encoding="ascii") as file:
            token, mode = file.read(), os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return make_token(path)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(
            f"{path} cannot be read: {error}", hint="make a new one with `gpuyard web --new-token`"
        ) from error
    is_private = not mode & (stat.S_IRWXG | stat.S_IRWXO)
    return token if is_private and _SHAPE.fullmatch(token) else make_token(path)


def make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        write_atomically(path, token.encode(), mode=0o600, is_synced=False)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error
    return token
