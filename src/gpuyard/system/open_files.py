"""The limit on open files of this process."""

import resource
import sys

# More is of no use: steps and connections take fewer. select(), which programs that we start may use, fails above it.
_ENOUGH = 1024
_MOST_RESERVED = 64


def open_files_limit() -> int:
    return _as_number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_files_limit() -> int:
    """Raise the limit to 1,024 open files, if it is lower and may be raised. Return the limit before."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(_ENOUGH, _as_number(most))
    if _as_number(before) < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    return _as_number(before)


def first_reserved_descriptor() -> int:
    """Return the descriptor from which on few are left, which leases leave to other uses: the last 64, or a quarter.

    The system gives the lowest free number, so the number of a new descriptor counts the open files.
    """
    most = open_files_limit()
    return most - min(_MOST_RESERVED, most // 4)


def _as_number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
