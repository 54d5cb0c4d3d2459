"""A program on a pseudo-terminal, with the runner at the other end; and the hook of a workspace, a user's command that
the runner runs so before and after a task's program. A hook that exceeds its time limit gets SIGTERM, and SIGKILL 10 s
later."""

import contextlib
import errno
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from gpuyard.engines.common.spawn_program import CANNOT_EXECUTE, EVERY_SIGNAL, NOT_FOUND, exit_status
from gpuyard.engines.session.viewer import Loop
from gpuyard.system.system_limits import passes, remedy_of

T = TypeVar("T")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0


class PtyProgram:
    """`fileno()` is readable while there is output. The program's end of the terminal stays open here too. So its last
    output can be read after it has ended, and a program that closes its terminal does not look as if it had ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        terminal = environment.get("TERM", "")
        self._command = command
        self._environment = {**environment, "TERM": "screen-256color" if terminal in ("", "dumb") else terminal}
        self._ours, self._terminal = _when_possible(pty.openpty, "no terminal can be opened")
        os.set_blocking(self._ours, False)
        self._pending_keys = bytearray()
        self.resize(24, 80)
        self.pid: int | None = None
        self._status: int | None = None

    def fileno(self) -> int:
        return self._ours

    def start(self) -> None:
        self.pid = _when_possible(self._fork, "no process can be started")

    def _fork(self) -> int:
        """Return the program's pid. Blocks signals, because the forked child would handle them like the runner."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, EVERY_SIGNAL)
        try:
            pid = os.fork()
            if not pid:
                status = CANNOT_EXECUTE
                try:
                    status = _become(self._command, self._environment, self._terminal)
                finally:
                    os._exit(status)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def read(self) -> bytes:
        with contextlib.suppress(OSError):
            return os.read(self._ours, 1 << 16)
        return b""

    def remaining_output(self) -> Iterator[bytes]:
        """Yield what is left to read, for at most 2 s: processes that the program left behind may write forever."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and (output := self.read()):
            yield output

    def type(self, keys: bytes = b"") -> bool:
        """Write keys to the terminal. Return True if some have to wait until the program reads."""
        if len(self._pending_keys) + len(keys) <= 1 << 16:
            self._pending_keys += keys
        with contextlib.suppress(OSError):
            del self._pending_keys[: os.write(self._ours, self._pending_keys)]
        return bool(self._pending_keys)

    def resize(self, rows: int, columns: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, signum: int) -> None:
        """Send the signal to the program's group and to the terminal's foreground group, as closing a terminal does."""
        if self._status is not None:  # the pid may belong to another process by now
            return
        groups = {self.pid or 0}
        with contextlib.suppress(OSError):
            groups.add(os.tcgetpgrp(self._ours))
        for group in groups - {0, 1}:
            with contextlib.suppress(OSError):
                os.killpg(group, signum)

    def status(self) -> int | None:
        """Return the exit status (128 + the number for a signal), or None while the program runs."""
        if self.pid is not None and self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._status = exit_status(status)
        return self._status


def _when_possible(call: Callable[[], T], problem: str) -> T:
    """Return the result of the call. While a limit of the system prevents it, print that once and wait: 1 s, then twice
    as long each time, up to 30 s. A signal that is to end the task is followed by SIGKILL meanwhile."""
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            return call()
        except OSError as error:
            if not passes(error):
                raise
            if delay_s == _FIRST_DELAY_S:
                _report(f"{problem}: {error.strerror}; waits until it can ({remedy_of(error)})", CANNOT_EXECUTE)
        time.sleep(delay_s)
        delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)


def _become(command: Sequence[str], environment: Mapping[str, str], terminal: int) -> int:
    os.login_tty(terminal)
    signal.set_wakeup_fd(-1)
    for signum in EVERY_SIGNAL:
        with contextlib.suppress(OSError):  # the C library reserves some
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    search_path = environment.get("PATH", os.defpath)
    # Else a file that is not executable, so that the error can say why.
    path = shutil.which(command[0], path=search_path) or shutil.which(command[0], os.F_OK, search_path)
    if path is None:
        return _report(f"there is no program {command[0]}", NOT_FOUND)
    why = None
    # The second is for a script without an interpreter line, as in shells.
    for program, arguments in ((path, [*command]), ("/bin/sh", ["/bin/sh", path, *command[1:]])):
        try:
            os.execve(program, arguments, environment)  # noqa: S606
        except OSError as error:
            why = error.strerror
            if error.errno != errno.ENOEXEC:
                break
    return _report(f"{path} cannot be executed: {why}", CANNOT_EXECUTE)


def _report(text: str, status: int) -> int:
    with contextlib.suppress(OSError):  # the disk may be full
        os.write(2, os.fsencode(f"gpuyard: {text}\n"))
    return status


BEFORE, AFTER = "before", "after"
# The exit status of timeout(1).
TIMED_OUT = 124
KILL_AFTER_S = 10.0
_GPU_PLACE = re.compile(r"gpu((?:x|[0-9]+)(?:_(?:x|[0-9]+))*)", re.ASCII)


class Hook(PtyProgram):
    """One run of the hook, which starts at once. After a timeout its status is 124."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, loop: Loop) -> None:
        super().__init__(command, environment)
        self._timeout_s, self._loop = timeout_s, loop
        self._is_late = False
        self.start()
        loop.after(timeout_s, self._end_late)

    def status(self) -> int | None:
        status = super().status()
        return TIMED_OUT if self._is_late and status is not None else status

    @property
    def problem(self) -> str | None:
        """Why a hook that has ended failed, as the rest of a sentence about it; None if it succeeded."""
        if self._is_late:
            return f"did not end within {self._timeout_s:g} s"
        return f"failed with status {self.status()}" if self.status() else None

    def _end_late(self) -> None:
        if self.status() is None:
            self._is_late = True
            self.signal(signal.SIGTERM)
            self._loop.after(KILL_AFTER_S, lambda: self.signal(signal.SIGKILL))


def hook_variables(
    phase: str, place: str, log: str | None, outcome: str | None = None, status: int | None = None
) -> dict[str, str]:
    found = _GPU_PLACE.fullmatch(place)
    variables = {
        "GPUYARD_PHASE": phase,
        "GPUYARD_GPUS": found[1].replace("_", ",") if found else "",
        "GPUYARD_LOG": log,
        "GPUYARD_OUTCOME": outcome,
        "GPUYARD_EXIT_STATUS": None if status is None else str(status),
    }
    return {name: value for name, value in variables.items() if value is not None}
