"""The command as a real process, in a pipe or on a terminal."""

import os
import pty
import subprocess
import sys
from typing import Any

from tests import preloaded

GPUYARD = [sys.executable, "-m", "gpuyard"]
# Python warns on standard error about resources left open at exit; a forked program exits without that.
_STRICT = [sys.executable, "-W", "error::ResourceWarning", "-m", "gpuyard"] if preloaded.ALL_BY_EXEC else GPUYARD


def run(*arguments: str, text: str | None = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    # Pass os.environ explicitly: a line editor may have set COLUMNS only in the C environment.
    options = {"env": dict(os.environ), **options}
    done = subprocess.run(
        [*_STRICT, *arguments], capture_output=True, text=True, timeout=90, check=False, input=text, **options
    )
    assert "ResourceWarning" not in done.stderr, done.stderr
    return done


def run_on_terminal(*arguments: str, columns: int) -> str:
    """Return what the command prints on a terminal of that width."""
    controller, terminal = pty.openpty()
    size = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm", "PYTHONUTF8": "1"}
    with subprocess.Popen([*_STRICT, *arguments], stdout=terminal, stderr=terminal, env=size) as process:
        os.close(terminal)
        output = b""
        while chunk := _read(controller):
            output += chunk
    os.close(controller)
    assert process.returncode == 0, output
    return output.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports a closed terminal as an error
        return b""
