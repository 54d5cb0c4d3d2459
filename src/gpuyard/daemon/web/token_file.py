"""The page's token: in a file that only its user reads, so that pages stay open while the daemon is started anew."""

import os
import re
import secrets
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.system.atomic_files import write_atomically

_SHAPE = re.compile(r"[A-Za-z0-9_-]{32,}")


def read_token(path: Path) -> str:
    """The one that is there, or a new one where there is none, or others could have read it."""
    try:
        with path.open(encoding="ascii") as file:
            told, mode = file.read(), os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return make_token(path)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}", hint="`gpuyard web --new-token`") from error
    is_ours_alone = not mode & (stat.S_IRWXG | stat.S_IRWXO)
    return told if is_ours_alone and _SHAPE.fullmatch(told) else make_token(path)


def make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        write_atomically(path, token.encode(), mode=0o600, is_synced=False)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error
    return token
