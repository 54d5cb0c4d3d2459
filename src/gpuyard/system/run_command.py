"""Runs a command in a session of its own, with a time limit, after which it is killed with its children."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

_REAP_S = 1.0


class NotInTime(Exception):
    """The command was killed at its time limit; `errors` is what it had written to standard error."""

    def __init__(self, errors: bytes) -> None:
        super().__init__("it was killed at its time limit")
        self.errors = errors


def run_command(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Return its exit status and what it wrote to standard output and standard error. Raises NotInTime; OSError or
    ValueError if it cannot be started."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        printed, errors = process.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise NotInTime(error.stderr or b"") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so its pid is its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_REAP_S)
    return process.returncode, printed, errors
