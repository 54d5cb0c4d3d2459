"""Send one message to one target, in a child process with a time limit (default: 30 s).

A command gets the values as environment variables and the body on standard input, so a shell never parses the name of a
job. A URL goes to Apprise in a child, on standard input: all users of the machine can see command lines.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

from msgspec import Struct

from gpuyard.core.notify.messages import Message
from gpuyard.core.notify.subscriptions import is_url, redact
from gpuyard.installation import find_installation

LIMIT_S = 30.0
POLL_EVERY_S = 0.05
_APPRISE = (sys.executable, "-P", "-m", "gpuyard.daemon.notify.apprise_process")
# These mark the processes of a job; the daemon may have been started from one.
_JOB_VARIABLES = ("GPUYARD_QUEUE", "GPUYARD_LEASE", "GPUYARD_ATTEMPT")
_MAX_OUTPUT_BYTES = 4096
_MAX_READS = 64
_REAP_S = 0.5


class Result(Struct, frozen=True, kw_only=True):
    """`problem` is why the message was not sent, without secrets of the URL; None if it was sent."""

    problem: str | None = None


def apprise_missing() -> str:
    """Return the warning, with the command that installs Apprise."""
    how = find_installation().with_extra("notify")
    return f"notifications to URLs need Apprise, which is not installed; install it with `{how}`"


def has_apprise() -> bool:
    return importlib.util.find_spec("apprise") is not None


def send(target: str, message: Message, limit_s: float = LIMIT_S) -> Result:
    """Send and wait for the result."""
    if is_url(target) and not has_apprise():
        return Result(problem=apprise_missing())
    sending = Sending(target, message, limit_s)
    try:
        while (result := sending.poll()) is None:
            time.sleep(POLL_EVERY_S)
        return result
    finally:
        sending.end()


class Sending:
    """A message in flight. The caller polls it until it returns a result."""

    def __init__(self, target: str, message: Message, limit_s: float = LIMIT_S) -> None:
        self.target = target
        self.message = message
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._output = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None
        try:
            self._process = _spawn(target, message)
            self._write(_apprise_input(target, message) if is_url(target) else f"{message.body}\n".encode())
        except (OSError, ValueError) as error:  # a target that cannot be encoded is a ValueError
            self._problem = f"cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"

    def poll(self) -> Result | None:
        """Return None while the message is in flight. Ends the child when its time is up."""
        process = self._process
        if process is None or self._problem is not None:
            self.end()
            return Result(problem=self._problem)
        status = process.poll()
        self._read_output(process)
        if status is None and time.monotonic() < self._deadline:
            return None
        if status is None:
            self.end()
            return Result(problem=self._with_last_line(f"timed out after {self._limit_s:g} s"))
        self._close(process)
        how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        return Result(problem=None if status == 0 else self._with_last_line(how))

    def end(self) -> None:
        """Kill the child and the processes that it has started, unless it has ended."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        self._close(process)

    def _write(self, content: bytes) -> None:
        """Write without blocking: the content fits into the pipe, and a child need not read it."""
        assert self._process is not None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # the child does not read
            os.write(self._process.stdin.fileno(), content)
        self._process.stdin.close()

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        """Keep the end of the output. A child that writes faster than this reads has to wait."""
        assert process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):
                chunk = os.read(process.stdout.fileno(), 65536)
                self._output = (self._output + chunk)[-_MAX_OUTPUT_BYTES:]
                if not chunk:
                    return

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _with_last_line(self, how: str) -> str:
        lines = self._output.decode("utf-8", "replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        last = "".join(letter if letter.isprintable() else "?" for letter in last)
        shown = redact(last, self.target) if is_url(self.target) else last
        return f"{how}: {shown[:200]}" if shown else how


def _spawn(target: str, message: Message) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    process = subprocess.Popen(
        _APPRISE if is_url(target) else ("/bin/sh", "-c", target),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
        env=inherited if is_url(target) else {**inherited, **_variables(message)},
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _variables(message: Message) -> dict[str, str]:
    return {
        "GPUYARD_EVENT": message.events,
        "GPUYARD_TITLE": message.title,
        "GPUYARD_BODY": message.body,
        "GPUYARD_JOB_ID": message.jobs,
        "GPUYARD_JOB_NAME": message.name,
        "GPUYARD_JOB_STATE": message.state,
        "GPUYARD_LOG": message.log,
    }


def _apprise_input(url: str, message: Message) -> bytes:
    return json.dumps({"url": url.strip(), "title": message.title, "body": message.body}).encode()
