"""The starter: spawns the daemon from a process of its own, prints the daemon's pid, and ends (see `autostart`).

It runs as a file, without site-packages (`python -I -S`), which takes less time: it imports nothing of ours.
"""

import os
import signal
import sys


def _launch(command: "list[str]") -> int:
    """Spawn the daemon from the starter, which has its own session and only the standard streams open."""
    may_be_reset = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    out_to_log = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    return os.posix_spawn(
        command[0], tuple(command), os.environ, file_actions=out_to_log, setsigmask=(), setsigdef=may_be_reset
    )


if __name__ == "__main__":
    print(_launch(sys.argv[1:]))  # noqa: T201 - the caller reads it
