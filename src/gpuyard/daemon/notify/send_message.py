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

from gpuyard.core.notify.messages import Message
from gpuyard.core.notify.subscriptions import is_url, redact
from gpuyard.core.printable_text import printable
from gpuyard.system.passing_errors import passes

LIMIT_S = 30.0
POLL_EVERY_S = 0.05
_APPRISE = (sys.executable, "-P", "-m", "gpuyard.daemon.notify.apprise_process")
# These mark the processes of a job; the daemon may have been started from one.
_JOB_VARIABLES = ("GPUYARD_QUEUE", "GPUYARD_LEASE", "GPUYARD_ATTEMPT")
_MAX_OUTPUT_BYTES = 4096
_MAX_READS = 64
_REAP_S = 0.5


def apprise_missing() -> str:
    """Return the warning, with the command that installs Apprise."""
    from gpuyard.installation import find_installation  # takes 14 ms

    how = find_installation().with_extra("notify")
    return f"notifications to URLs need Apprise, which is not installed; install it with `{how}`"


def has_apprise() -> bool:
    return importlib.util.find_spec("apprise") is not None


def send(target: str, message: Message, limit_s: float = LIMIT_S) -> str | None:
    """Send, and return why the message was not sent, without secrets of the URL; None if it was sent."""
    if is_url(target) and not has_apprise():
        return apprise_missing()
    sending = Sending(target, message, limit_s)
    try:
        while sending.is_in_flight():
            time.sleep(POLL_EVERY_S)
        return sending.problem
    finally:
        sending.end()


class Sending:
    """A message in flight. When it is no longer, `problem` says why it was not sent, without secrets of the URL."""

    def __init__(self, target: str, message: Message, limit_s: float = LIMIT_S) -> None:
        self.target = target
        self.message = message
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._output = b""
        self._process: subprocess.Popen[bytes] | None = None
        self.problem: str | None = None
        self.may_begin_later = False  # a limit of the system kept its process from starting
        try:
            self._process = _spawn(target, message)
            url_input = {"url": target.strip(), "title": message.title, "body": message.body}
            self._write(json.dumps(url_input).encode() if is_url(target) else f"{message.body}\n".encode())
        except (OSError, ValueError) as error:  # a target that cannot be encoded is a ValueError
            self.problem = f"cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"
            self.may_begin_later = self._process is None and isinstance(error, OSError) and passes(error)

    def is_in_flight(self) -> bool:
        """Ends the child when its time is up."""
        process = self._process
        if process is None or self.problem is not None:
            self.end()
            return False
        status = process.poll()
        self._read_output(process)
        if status is None and time.monotonic() < self._deadline:
            return True
        self.end()
        if status is None:
            self.problem = self._with_last_line(f"timed out after {self._limit_s:g} s")
        elif status != 0:
            how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
            self.problem = self._with_last_line(how)
        return False

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
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

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

    def _with_last_line(self, how: str) -> str:
        lines = self._output.decode("utf-8", "replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        shown = redact(last, self.target) if is_url(self.target) else last
        return f"{how}: {printable(shown, 200)}" if shown else how


def _spawn(target: str, message: Message) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    if not is_url(target):
        environment |= {
            "GPUYARD_EVENT": message.events,
            "GPUYARD_TITLE": message.title,
            "GPUYARD_BODY": message.body,
            "GPUYARD_JOB_ID": message.jobs,
            "GPUYARD_JOB_NAME": message.name,
            "GPUYARD_JOB_STATE": message.state,
            "GPUYARD_LOG": message.log,
        }
    process = subprocess.Popen(
        _APPRISE if is_url(target) else ("/bin/sh", "-c", target),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
        env=environment,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process
