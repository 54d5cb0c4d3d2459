"""Users and commands of the processes on a device, as far as this user may see them."""

import os
from collections.abc import Iterable

from msgspec import Struct


class ProcessInfo(Struct, frozen=True, kw_only=True):
    user: str | None = None
    command: str | None = None


def describe_processes(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """Return an entry for each live pid. A driver may report pids of another container, which do not exist here."""
    import psutil

    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                found[pid] = ProcessInfo(user=process.username(), command=_command(process.cmdline(), process.name()))
        except (psutil.Error, OSError, KeyError):
            continue
    return found


def _command(argv: list[str], name: str) -> str:
    """Return the command on one line, without the program's directory and without control characters."""
    text = " ".join([os.path.basename(argv[0]), *argv[1:]]) if argv and argv[0] else name
    return "".join(letter if letter.isprintable() else " " for letter in text)
