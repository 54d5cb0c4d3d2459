"""The command as a real process, in a pipe or on a terminal."""

import os
import pty
import subprocess
import sys
from typing import Any

from tests import preloaded

GPUYARD = [sys.executable, "-m", "gpuyard"]
# Python says on standard error what a command has left open when it ends; a forked program ends without that.
_STRICT = [sys.executable, "-W", "error::ResourceWarning", "-m", "gpuyard"] if preloaded.ALL_BY_EXEC else GPUYARD


def run(*arguments: str, text: str | None = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    # Named even where it is as it is: a line editor in this process may have told the system alone of a width.
    options = {"env": dict(os.environ), **options}
    done = subprocess.run(
        [*_STRICT, *arguments], capture_output=True, text=True, timeout=90, check=False, input=text, **options
    )
    assert "ResourceWarning" not in done.stderr, done.stderr
    return done


def run_on_terminal(*arguments: str, columns: int) -> str:
    """What a terminal of that width is told."""
    own, theirs = pty.openpty()
    size = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm", "PYTHONUTF8": "1"}
    with subprocess.Popen([*_STRICT, *arguments], stdout=theirs, stderr=theirs, env=size) as process:
        os.close(theirs)
        told = b""
        while chunk := _read(own):
            told += chunk
    os.close(own)
    assert process.returncode == 0, told
    return told.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux tells the end of a terminal so
        return b""
