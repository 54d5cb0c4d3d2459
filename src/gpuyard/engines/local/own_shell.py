"""What has to be changed for a program that gets the umask, the niceness and the limits of the shell that submitted it.

Most jobs come from a shell that has what the daemon has: then nothing is changed, and starting them costs nothing more.
"""

import sys

from msgspec import convert

from gpuyard.core.job.shell_settings import UNLIMITED, ShellSettings, differences
from gpuyard.engines.common.spawn_program import LEASE_AT, ShellChange
from gpuyard.system.submitting_shell import limit_number, read_shell_settings

# A program gets its lease with this number, which has to be below its limit.
_FEWEST_OPEN_FILES = LEASE_AT + 1


class OwnShell:
    """The settings of this process, which its keeper inherits; `open_files` is the limit of jobs that have none."""

    def __init__(self, open_files: int) -> None:
        own = read_shell_settings()
        own["limits"]["NOFILE"] = UNLIMITED if open_files == sys.maxsize else open_files
        self._settings = convert(own, ShellSettings)
        self._open_files = open_files

    def changes(self, wanted: ShellSettings | None) -> tuple[int, ShellChange | None]:
        """Return the limit on open files, which the keeper sets for each program, and the other changes."""
        if wanted is None or wanted == self._settings:
            return self._open_files, None
        changed = differences(wanted, self._settings)
        limits = {number: soft for name, soft in changed.limits.items() if (number := limit_number(name)) is not None}
        nofile = limits.pop(limit_number("NOFILE") or 0, self._open_files)
        open_files = sys.maxsize if nofile == UNLIMITED else max(nofile, _FEWEST_OPEN_FILES)
        if changed.umask is None and changed.niceness is None and not limits:
            return open_files, None
        return open_files, (changed.umask, changed.niceness, limits)
