"""Queues and sends notifications, so that a slow target never delays the daemon: each in a child process with a time
limit.

- A command gets the values as environment variables and the body on standard input, so a shell never parses the name
  of a job. A URL goes to Apprise in a child, on standard input: all users of the machine can see command lines.
- Each target has at most one message in flight. The number that waits is bounded: those above the limit are dropped,
  and the next message to their target gives the count.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpuyard.daemon.notify.messages import Message, Occurrence, Outbox
from gpuyard.model.printable_text import printable
from gpuyard.model.subscriptions import is_url, redact, redacted_target
from gpuyard.system.system_limits import passes

_log = logging.getLogger(__name__)
LIMIT_S = 30.0
_MAX_WAITING = 10_000


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
    """Send, and return why the message was not sent, without secrets of the URL; None if it was sent. Raise OSError if
    a limit of the system keeps the child from starting. The child is killed once it `is_given_up`."""
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
        url_input = {"url": target.strip(), "title": message.title, "body": message.body}
        content = json.dumps(url_input) if is_url(target) else f"{message.body}\n"
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # the content fits into the pipe, and a child need not read it
        with contextlib.suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), content.encode())
        process.stdin.close()
        while (status := process.poll()) is None and time.monotonic() < deadline and not is_given_up.is_set():
            output = _read_output(process, output)
            is_given_up.wait(0.05)
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
            process.wait(0.5)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _read_output(process: "subprocess.Popen[bytes]", before: bytes) -> bytes:
    """Return the end of the output. A child that writes faster than this reads has to wait."""
    assert process.stdout is not None
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            chunk = os.read(process.stdout.fileno(), 65536)
            before = (before + chunk)[-4096:]
            if not chunk:
                break
    return before


def _spawn(target: str, message: Message) -> subprocess.Popen[bytes]:
    # These mark the processes of a job; the daemon may have been started from one.
    marks = ("GPUYARD_QUEUE", "GPUYARD_LEASE", "GPUYARD_ATTEMPT")
    environment = {name: value for name, value in os.environ.items() if name not in marks}
    apprise = (sys.executable, "-P", "-m", "gpuyard.daemon.notify.apprise_process")
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
        apprise if is_url(target) else ("/bin/sh", "-c", target),
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


class Delivery:
    """`retry_after_s`: after which a service that failed is tried once more."""

    def __init__(
        self,
        host: str,
        per_minute: int,
        on_notice: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        retry_after_s: float = 10.0,
    ) -> None:
        self.per_minute, self._host, self._on_notice, self._limit_s = per_minute, host, on_notice, limit_s
        self._retry_after_s = retry_after_s
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(8, "gpuyard-notify")
        self._in_flight: set[asyncio.Future[str | None]] = set()
        self._is_closed = threading.Event()
        self._has_reported_apprise = False

    def put(self, addressed: Sequence[tuple[str, Occurrence]]) -> None:
        """Queue notifications. Those for one target in one call become one message."""
        now, waiting = time.monotonic(), sum(map(len, self._outboxes.values()))
        for target in [each for each, box in self._outboxes.items() if box.is_over(now) and each not in self._tasks]:
            del self._outboxes[target]
        for target, occurrence in addressed:
            outbox = self._outboxes.setdefault(target, Outbox())
            if waiting < _MAX_WAITING:
                outbox.add(occurrence)
            else:
                outbox.add_dropped(1)
            waiting += 1
            if target not in self._tasks:
                self._tasks[target] = asyncio.get_running_loop().create_task(self._serve(target, outbox))

    async def close(self) -> None:
        """End. Messages in flight have a second to complete."""
        await asyncio.sleep(0)  # for those that were put just now
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=1.0)
        left = sum(map(len, self._outboxes.values())) + sum(not each.done() for each in self._in_flight)
        for task in list(self._tasks.values()):
            task.cancel()
        self._is_closed.set()
        self._threads.shutdown()
        if left:
            _log.warning("%d notifications were not sent before the daemon stopped", left)

    def check_apprise(self, targets: Sequence[str]) -> bool:
        """Return False, and report it once, if a target needs Apprise and Apprise is not installed."""
        if not any(map(is_url, targets)) or has_apprise():
            return True
        if not self._has_reported_apprise:
            self._has_reported_apprise = True
            notice = apprise_missing()
            _log.warning(notice)
            self._on_notice(notice)
        return False

    async def _serve(self, target: str, outbox: Outbox) -> None:
        try:
            while (due_at := outbox.due_at(self.per_minute)) is not None:
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                message = outbox.take(time.monotonic(), self.per_minute, self._host)
                if message is not None and self.check_apprise([target]):
                    await self._send(target, message)
        finally:
            del self._tasks[target]

    async def _send(self, target: str, message: Message) -> None:
        problem = await self._try(target, message)
        if problem is not None and is_url(target):
            await asyncio.sleep(self._retry_after_s)
            problem = await self._try(target, message)
        if problem is not None:
            _log.warning("a notification to %s was not sent: %s", redacted_target(target), problem)

    async def _try(self, target: str, message: Message) -> str | None:
        """Send in a thread. Try again later if a limit of the system kept the process or the thread from starting."""
        while True:
            try:
                sending = asyncio.get_running_loop().run_in_executor(
                    self._threads, send, target, message, self._limit_s, self._is_closed
                )
                self._in_flight.add(sending)
                sending.add_done_callback(self._in_flight.discard)
                return await sending
            except (OSError, RuntimeError):
                await asyncio.sleep(self._retry_after_s)
