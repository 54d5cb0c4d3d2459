"""A program that is forked for a test behaves like a program started by exec."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preloaded

PROGRAMS = {
    "status": "raise SystemExit(3)",
    "message": "raise SystemExit('no space')",
    "streams": "import sys; print(sys.stdin.read().upper()); print('beside', file=sys.stderr)",
    "arguments": "import os, sys; print(sys.argv, os.getcwd(), sys.path[0], __name__)",
    "environment": "import os; print(os.environ['ODD'], open('/proc/self/environ').read().count('ODD=ä b\\0'))",
    "descriptors": "import os; print(len(os.listdir('/proc/self/fd')))",
    "threads": "import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print).start()",
    "closed": "import sys; sys.stdout.close()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_program_has_the_same_output_and_status(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAMS[name], "a b"]
    environment = {**os.environ, "ODD": "ä b"}
    forked, started = (
        popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
            env=environment, text=True,
        )
        for popen in (subprocess.Popen, preloaded._Popen)
    )  # fmt: skip
    assert forked.communicate("line\n", timeout=60) == started.communicate("line\n", timeout=60)
    assert forked.returncode == started.returncode


def test_a_forked_program_prints_its_exception_and_ends_on_an_interrupt() -> None:
    failed = subprocess.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    script = "import sys, time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def test_waiting_for_a_forked_program_can_time_out() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
    assert process.poll() == 0
