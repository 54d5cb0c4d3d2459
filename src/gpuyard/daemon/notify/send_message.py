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
import threading
import time

from gpuyard.core.notify.messages import Message
from gpuyard.core.notify.subscriptions import is_url, redact
from gpuyard.core.printable_text import printable
from gpuyard.system.passing_errors import passes

LIMIT_S = 30.0
_POLL_EVERY_S = 0.05
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


def send(
    target: str, message: Message, limit_s: float = LIMIT_S, is_given_up: threading.Event | None = None
) -> str | None:
    """Send, and return why the message was not sent, without secrets of the URL; None if it was sent.

    Raise OSError if a limit of the system keeps the child from starting. The child is killed once it `is_given_up`.
    """
    if is_url(target) and not has_apprise():
        return apprise_missing()
    is_given_up = is_given_up or threading.Event()
    try:
        process = _spawn(target, message)
    except (OSError, ValueError) as error:  # a target that cannot be encoded is a ValueError
        if isinstance(error, OSError) and passes(error):
            raise
        return f"cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"
    deadline, output = time.monotonic() + limit_s, b""
    try:
        _write_input(process, target, message)
        while (status := process.poll()) is None and time.monotonic() < deadline and not is_given_up.is_set():
            output = _read_output(process, output)
            is_given_up.wait(_POLL_EVERY_S)
        output = _read_output(process, output)
    finally:
        _end(process)
    if status == 0:
        return None
    timed_out = f"timed out after {limit_s:g} s"
    how = timed_out if status is None else f"exit status {status}" if status > 0 else f"killed by signal {-status}"
    last = next(filter(None, map(str.strip, reversed(output.decode("utf-8", "replace").splitlines()))), "")
    shown = redact(last, target) if is_url(target) else last
    return f"{how}: {printable(shown, 200)}" if shown else how


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the child and the processes that it has started, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _write_input(process: "subprocess.Popen[bytes]", target: str, message: Message) -> None:
    """Write without blocking: the content fits into the pipe, and a child need not read it."""
    url_input = {"url": target.strip(), "title": message.title, "body": message.body}
    content = json.dumps(url_input) if is_url(target) else f"{message.body}\n"
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    with contextlib.suppress(BrokenPipeError):  # the child does not read
        os.write(process.stdin.fileno(), content.encode())
    process.stdin.close()


def _read_output(process: "subprocess.Popen[bytes]", before: bytes) -> bytes:
    """Return the end of the output. A child that writes faster than this reads has to wait."""
    assert process.stdout is not None
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MAX_READS):
            chunk = os.read(process.stdout.fileno(), 65536)
            before = (before + chunk)[-_MAX_OUTPUT_BYTES:]
            if not chunk:
                break
    return before


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
