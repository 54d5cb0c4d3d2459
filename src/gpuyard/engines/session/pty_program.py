"""A task's program on a terminal of its own, which the runner holds the other end of."""

import contextlib
import errno
import fcntl
import os
import pty
import shutil
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

CANNOT_EXECUTE, NOT_FOUND, BY_SIGNAL = 126, 127, 128
_ROWS, _COLUMNS = 24, 80
_EVERY_SIGNAL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_TERMINALS_THAT_CANNOT = ("", "dumb")
_MOST_UNTYPED = 1 << 16
_CHUNK = 1 << 16
_DRAINED_WITHIN_S = 2.0


class PtyProgram:
    """`fileno()` is readable while there is output. The other end is held open here too: so what the program wrote is
    there to be read after its end, and one that closes its terminal is not taken for one that has ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = {**environment, "TERM": _terminal_of(environment.get("TERM", ""))}
        self._ours, self._its = pty.openpty()
        os.set_blocking(self._ours, False)
        self._untyped = bytearray()
        self.resize(_ROWS, _COLUMNS)
        self.pid: int | None = None
        self._has_ended = False

    def fileno(self) -> int:
        return self._ours

    def start(self) -> None:
        """Signals wait meanwhile, and find the program: the child of a fork would take them for the runner's."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _EVERY_SIGNAL)
        pid = os.fork()
        if not pid:
            status = CANNOT_EXECUTE
            try:
                status = _become(self._command, self._environment, self._its)
            finally:
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = pid

    def read(self) -> bytes:
        """Empty where there is nothing now."""
        try:
            return os.read(self._ours, _CHUNK)
        except OSError:
            return b""

    def rest(self) -> Iterator[bytes]:
        """What it wrote last; not what somebody it left behind may write forever."""
        deadline = time.monotonic() + _DRAINED_WITHIN_S
        while time.monotonic() < deadline and (output := self.read()):
            yield output

    def type(self, keys: bytes = b"") -> bool:
        """True where some of what was typed has to wait until the program reads."""
        if len(self._untyped) + len(keys) <= _MOST_UNTYPED:
            self._untyped += keys
        with contextlib.suppress(OSError):
            del self._untyped[: os.write(self._ours, self._untyped)]
        return bool(self._untyped)

    def resize(self, rows: int, columns: int) -> None:
        """The kernel tells the program in the foreground."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, signum: int) -> None:
        """To its group, and to the one that has the terminal's foreground, as when a terminal is closed."""
        if self._has_ended:  # its number may be another's by now
            return
        groups = {self.pid}
        with contextlib.suppress(OSError):
            groups.add(os.tcgetpgrp(self._ours))
        for group in groups:
            if group is not None and group > 1:
                with contextlib.suppress(OSError):
                    os.killpg(group, signum)

    def status(self) -> int | None:
        """Once it has ended; 128 and more for a signal."""
        if self.pid is None:
            return None
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            return None
        self._has_ended = True
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else BY_SIGNAL - code


def _terminal_of(name: str) -> str:
    return "screen-256color" if name in _TERMINALS_THAT_CANNOT else name


def _become(command: Sequence[str], environment: Mapping[str, str], terminal: int) -> int:
    os.login_tty(terminal)
    signal.set_wakeup_fd(-1)
    for signum in _EVERY_SIGNAL:
        with contextlib.suppress(OSError):  # the C library keeps some to itself
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    path = _find(command[0], environment.get("PATH", os.defpath))
    if path is None:
        return _complain(f"there is no program {command[0]}", NOT_FOUND)
    try:
        _execute(path, command, environment)
    except OSError as error:
        return _complain(f"{path} cannot be executed: {error.strerror}", CANNOT_EXECUTE)


def _find(name: str, places: str) -> str | None:
    """One that can be executed, else one that cannot: so that it can be said why."""
    return shutil.which(name, path=places) or shutil.which(name, os.F_OK, places)


def _execute(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    try:
        os.execve(path, [*command], environment)  # noqa: S606
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    os.execve("/bin/sh", ["/bin/sh", path, *command[1:]], environment)  # noqa: S606 - as shells do


def _complain(text: str, status: int) -> int:
    os.write(2, os.fsencode(f"gpuyard: {text}\n"))
    return status
