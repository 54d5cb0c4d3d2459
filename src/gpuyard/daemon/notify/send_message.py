"""One message to one target: a child process of its own, which has so long and no longer.

A command gets its figures as variables and the body as standard input, so nothing that a job is called is ever read by
a shell. A URL goes to Apprise in a child, through its standard input: arguments can be seen by everybody.
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
LOOK_EVERY_S = 0.05
_APPRISE = (sys.executable, "-P", "-m", "gpuyard.daemon.notify.apprise_process")
# By this the processes of a job are known; the daemon may have been started by one.
_NOT_FOR_CHILDREN = ("GPUYARD_QUEUE", "GPUYARD_LEASE", "GPUYARD_ATTEMPT")
_KEPT_BYTES = 4096
_CHUNKS = 64
_REAP_S = 0.5


class Result(Struct, frozen=True, kw_only=True):
    """What came of it; `problem` where it was not sent, without any secret of a URL."""

    problem: str | None = None


def apprise_missing() -> str:
    """The words for it, with the line that installs it."""
    how = find_installation().with_extra("notify")
    return f"notifications to URLs are not sent: Apprise is not installed; `{how}` installs it"


def has_apprise() -> bool:
    return importlib.util.find_spec("apprise") is not None


def send(target: str, message: Message, limit_s: float = LIMIT_S) -> Result:
    """In the foreground."""
    if is_url(target) and not has_apprise():
        return Result(problem=apprise_missing())
    sending = Sending(target, message, limit_s)
    try:
        while (result := sending.poll()) is None:
            time.sleep(LOOK_EVERY_S)
        return result
    finally:
        sending.end()


class Sending:
    """One that is under way, or could not even begin; whoever has it asks it now and then."""

    def __init__(self, target: str, message: Message, limit_s: float = LIMIT_S) -> None:
        self.target = target
        self.message = message
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._said = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble: str | None = None
        try:
            self._process = _spawn(target, message)
            self._hand_over(_as_url(target, message) if is_url(target) else f"{message.body}\n".encode())
        except (OSError, ValueError) as error:  # a target that cannot be encoded is a ValueError
            self._trouble = f"it cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"

    def poll(self) -> Result | None:
        """`None` while it is under way."""
        process = self._process
        if process is None or self._trouble is not None:
            self.end()
            return Result(problem=self._trouble)
        status = process.poll()
        self._listen(process)
        if status is None and time.monotonic() < self._deadline:
            return None
        if status is None:
            self.end()
            return Result(problem=self._with_last_line(f"it had not ended after {self._limit_s:g} s"))
        self._close(process)
        how = f"it ended with status {status}" if status > 0 else f"it was ended by signal {-status}"
        return Result(problem=None if status == 0 else self._with_last_line(how))

    def end(self) -> None:
        """Where it has not ended by itself, with all that it has started."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        self._close(process)

    def _hand_over(self, content: bytes) -> None:
        """At once or not at all: a pipe has room for it, and one that does not read holds nobody up."""
        assert self._process is not None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it need not read
            os.write(self._process.stdin.fileno(), content)
        self._process.stdin.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Keeps the end of what it has said; one that says more than is listened to has to wait."""
        assert process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(_CHUNKS):
                chunk = os.read(process.stdout.fileno(), 65536)
                self._said = (self._said + chunk)[-_KEPT_BYTES:]
                if not chunk:
                    return

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _with_last_line(self, how: str) -> str:
        lines = self._said.decode("utf-8", "replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        last = "".join(letter if letter.isprintable() else "?" for letter in last)
        said = redact(last, self.target) if is_url(self.target) else last
        return f"{how}: {said[:200]}" if said else how


def _spawn(target: str, message: Message) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
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


def _as_url(url: str, message: Message) -> bytes:
    return json.dumps({"url": url.strip(), "title": message.title, "body": message.body}).encode()
