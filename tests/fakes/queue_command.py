"""The command as a real process, in a pipe or on a terminal; or in this process, where only its output matters."""

import io
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from gpuyard.config import _Tolerance
from gpuyard.ui.cli import main
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


def run_here(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in this process, with its output in a pipe: twenty times as fast."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    status = 0
    streams = redirect_stdout(output), redirect_stderr(errors)
    tolerance = mock.patch.object(_Tolerance, "report", _Tolerance.report)  # which some verbs set for good
    with streams[0], streams[1], mock.patch.object(sys, "argv", ["gpuyard", *arguments]), tolerance:
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    texts = (bytes(each.buffer.getvalue()).decode() for each in (output, errors))
    return subprocess.CompletedProcess(arguments, status, *texts)


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
