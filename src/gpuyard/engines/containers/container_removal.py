"""Removes a container with its tool, which may fail or hang: a container daemon does both.

- Nothing here blocks. `has_succeeded` looks after the removal, and is to be called again after `next_check_s` at the
  latest.
- A tool that has not ended after 30 s is killed. No second one starts before the first has ended.
- A removal that failed is tried again after 10 s, and then after twice as long each time, up to 10 minutes.
- The first failure is logged as a warning, and after that one an hour.
"""

import contextlib
import logging
import math
import os
import shlex
import signal
import subprocess
import time

from msgspec import Struct

from gpuyard.system.wakeable_poll import WakeablePoll

_log = logging.getLogger(__name__)
_LIMIT_S = 30.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 600.0
_WARN_AGAIN_S = 3600.0
# Between the end of a tool's output and the tool's own end.
_END_S = 0.05
_NOT_THERE = b"no such container"
_MOST_SAID = 1 << 16


class RemoveCommand(Struct, frozen=True):
    """The command that removes a container, whose name is the last argument."""

    command: tuple[str, ...]
    environment: dict[str, str]


class _RunningTool:
    def __init__(self, removal: RemoveCommand) -> None:
        self._process = subprocess.Popen(
            removal.command,
            env=removal.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self.pipe = self._process.stderr.fileno()
        self.is_silent = False  # it has closed its output
        self._said = b""
        self._kill_at = time.monotonic() + _LIMIT_S
        os.set_blocking(self.pipe, False)

    def has_ended(self) -> bool:
        has_ended = self._process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            said = os.read(self.pipe, _MOST_SAID)
            self.is_silent = not said
            self._said = (self._said + said)[-_MOST_SAID:]
        if not has_ended and time.monotonic() >= self._kill_at:
            self._kill_at = math.inf
            self._said = b"it did not end within %d s" % _LIMIT_S
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so its pid is its own
        return has_ended

    def finish(self) -> tuple[bool, str]:
        """Return whether the container is gone, and what the tool said. Call it after the tool's end."""
        with self._process:
            is_gone = self._process.wait() == 0 or _NOT_THERE in self._said.lower()
            return is_gone, self._said.decode(errors="replace").strip() or f"exit status {self._process.returncode}"

    def next_check_s(self, now: float) -> float:
        return _END_S if self.is_silent else max(0.0, self._kill_at - now)


class ContainerRemoval:
    """The removal of one container, from the first attempt until it has succeeded."""

    def __init__(self, removal: RemoveCommand, poll: WakeablePoll) -> None:
        """`poll` is ready when `has_succeeded` should be called."""
        self.since = time.monotonic()
        self._removal = removal
        self._poll = poll
        self._tool: _RunningTool | None = None
        self._problem = ""
        self._retry_at, self._delay_s = 0.0, _FIRST_RETRY_S
        self._warned_at = -math.inf
        self._start()

    @property
    def container(self) -> str:
        return self._removal.command[-1]

    @property
    def problem(self) -> str | None:
        """Why the container is still there, and what to do; None before the first failure."""
        if not self._problem:
            return None
        command = shlex.join(self._removal.command)
        return f"the container {self.container} cannot be removed ({self._problem}): try `{command}`"

    def has_succeeded(self) -> bool:
        """Continue the removal. Return whether the container is gone."""
        if self._tool is None:
            if time.monotonic() >= self._retry_at:
                self._start()
            return False
        tool, was_silent = self._tool, self._tool.is_silent
        has_ended = tool.has_ended()
        if not was_silent and (has_ended or tool.is_silent):
            self._poll.forget(tool.pipe)  # it would stay readable
        if not has_ended:
            return False
        self._tool = None
        is_gone, said = tool.finish()
        if not is_gone:
            self._note_failure(said)
        return is_gone

    def next_check_s(self) -> float:
        now = time.monotonic()
        return max(0.0, self._retry_at - now) if self._tool is None else self._tool.next_check_s(now)

    def _start(self) -> None:
        try:
            self._tool = _RunningTool(self._removal)
        except OSError as error:
            self._note_failure(str(error))
        else:
            self._poll.watch(self._tool.pipe)

    def _note_failure(self, problem: str) -> None:
        now = time.monotonic()
        self._problem = problem
        self._retry_at, self._delay_s = now + self._delay_s, min(_LONGEST_RETRY_S, self._delay_s * 2)
        if now >= self._warned_at + _WARN_AGAIN_S:
            self._warned_at = now
            _log.warning("the container %s was not removed, which is tried again: %s", self.container, problem)
