"""Reads the umask, the niceness and the limits of this process: a job gets those of the shell that submits it.

Imports nothing that takes milliseconds: `gpuyard submit` uses it.
"""

import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LIMITS = {
    name.removeprefix("RLIMIT_"): number
    for name, number in vars(resource).items()
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # an old name of NOFILE
}


def read_shell_settings() -> "dict[str, Any]":
    """Return the settings as the fields of `core.job.shell_settings.ShellSettings`."""
    return {
        "umask": _read_umask(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()},
    }


def hard_limits() -> dict[str, int]:
    return {name: resource.getrlimit(number)[1] for name, number in _LIMITS.items()}


def limit_number(name: str) -> int | None:
    """Return the system's number of a limit, or None if the system has no such limit."""
    return _LIMITS.get(name)


def _read_umask() -> int:
    """Read it from /proc where there is one: setting it to read it would affect files that other threads create."""
    try:
        with open("/proc/self/status", "rb") as file:
            return int(file.read(4096).partition(b"Umask:")[2].split(maxsplit=1)[0], 8)
    except (OSError, IndexError, ValueError):
        umask = os.umask(0o077)
        os.umask(umask)
        return umask
