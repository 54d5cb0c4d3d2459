"""Who the processes on a device are: their users and commands, as far as this user may see them."""

import os
from collections.abc import Iterable

from msgspec import Struct


class ProcessInfo(Struct, frozen=True, kw_only=True):
    user: str | None = None
    command: str | None = None


def describe_processes(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """One entry for each that is alive. A driver may tell pids of another container's, which are not here."""
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


def _command(words: list[str], name: str) -> str:
    """In one line, without the program's folder, and without the control characters that anybody may put into it."""
    text = " ".join([os.path.basename(words[0]), *words[1:]]) if words and words[0] else name
    return "".join(letter if letter.isprintable() else " " for letter in text)
