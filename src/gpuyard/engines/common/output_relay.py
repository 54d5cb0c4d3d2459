"""The relay: stands between a program and its log, and begins each line with the time (`submit --timestamps`).

The keeper starts it in place of the program, whose parent it is. It uses the standard library alone. The time is that
of the first byte of a line, and stands again after each carriage return. The relay ends after the program, with its
status; if processes that the program left behind hold the pipe, a child of the relay goes on reading."""

import contextlib
import errno
import os
import re
import select
import signal
import sys
import time

from gpuyard.engines.common.log_cap import cut_if_over
from gpuyard.engines.common.spawn_program import CANNOT_EXECUTE, EVERY_SIGNAL, exit_status
from gpuyard.system.processes import python_command
from gpuyard.system.wakeable_poll import open_signal_pipe

_CHUNK = 1 << 14
# A line end at the end of a chunk is not among them: the time comes with the first byte of the next line.
_LINE_ENDS = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!\Z)")
# The relay stops and goes on with the program, and its own faults end it.
_KEPT = {
    signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip


def command(outputs: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Return the command of the relay; the program's path and its arguments follow. `outputs` are paths with caps."""
    words = [word for path, cap in outputs for word in (path, str(cap))]
    return python_command(__name__, str(len(outputs)), *words, options=("-I", "-S"))


class StampedOutput:
    """One stream of the program: a pipe that it writes to, and the file behind one of our own descriptors."""

    def __init__(self, target: int, path: str, cap: int) -> None:
        self.target = target
        self.pipe, self.program_end = os.pipe()
        os.set_blocking(self.pipe, False)
        self._path, self._cap = path, cap
        self._since_cut = 0
        self._starts_line, self._follows_return = True, False

    def pass_on(self) -> int:
        """Copy what is in the pipe. Return how much it was: 0 at its end, -1 if there is nothing at the moment."""
        try:
            chunk = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return -1
        stamped = self.stamp(chunk, time.time())
        self._since_cut += len(stamped)
        with contextlib.suppress(OSError):  # the disk is full: the program goes on
            while stamped:
                stamped = stamped[os.write(self.target, stamped) :]
            if self._cap and self._since_cut > self._cap // 8:
                self._since_cut = 0
                cut_if_over(self._path, self._cap)
        return len(chunk)

    def stamp(self, chunk: bytes, now: float) -> bytes:
        local = time.localtime(now)
        zone = time.strftime("%z", local)
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{int(now % 1 * 1000):03d}{zone[:3]}:{zone[3:]} ".encode()
        is_line_end = self._follows_return and chunk.startswith(b"\n")
        start = when if chunk and self._starts_line and not is_line_end else b""
        stamped = start + _LINE_ENDS.sub(rb"\g<0>" + when, chunk)
        if chunk:
            self._starts_line, self._follows_return = chunk.endswith((b"\n", b"\r")), chunk.endswith(b"\r")
        return stamped


def _start(path: str, arguments: list[str], streams: list[StampedOutput]) -> int:
    ends = [streams[0].program_end, streams[-1].program_end]
    actions = [(os.POSIX_SPAWN_DUP2, end, target) for end, target in zip(ends, (1, 2), strict=True)]
    for program, words in ((path, arguments), ("/bin/sh", ["/bin/sh", path, *arguments[1:]])):
        try:
            return os.posix_spawn(
                program, words, os.environ, file_actions=actions, setsigmask=(), setsigdef=EVERY_SIGNAL
            )
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
    raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC))


class OutputRelay:
    def __init__(self, streams: list[StampedOutput]) -> None:
        self._open = {stream.pipe: stream for stream in streams}
        self._poll = select.poll()
        for pipe in self._open:
            self._poll.register(pipe, select.POLLIN)

    def run(self, program: int, ends: int) -> int:
        """Pass on output until the program has ended, and return its exit status. `ends` is readable then."""
        self._poll.register(ends, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                self._pass_on(descriptor)
            with contextlib.suppress(BlockingIOError):
                os.read(ends, _CHUNK)  # before the program is looked at: its end is reported once
            pid, status = os.waitpid(program, os.WNOHANG)
            if pid:
                self._poll.unregister(ends)
                return exit_status(status)

    def drain(self) -> bool:
        """Pass on what the program has written. Return whether another process may write more."""
        for pipe in list(self._open):
            while self._pass_on(pipe) > 0:
                pass
        return bool(self._open)

    def run_to_end(self) -> None:
        while self._open:
            for pipe, _ in self._poll.poll():
                self._pass_on(pipe)

    def _pass_on(self, pipe: int) -> int:
        stream = self._open.get(pipe)
        count = -1 if stream is None else stream.pass_on()
        if not count:
            self._poll.unregister(pipe)
            del self._open[pipe]
        return count


def main() -> None:
    count = int(sys.argv[1])
    words, (path, *arguments) = sys.argv[2 : 2 + 2 * count], sys.argv[2 + 2 * count :]
    for signum in EVERY_SIGNAL - _KEPT:
        with contextlib.suppress(OSError):  # the C library reserves some
            signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ends, _ = open_signal_pipe()
    streams = [StampedOutput(1 + at, words[2 * at], int(words[2 * at + 1])) for at in range(count)]
    try:
        program = _start(path, arguments, streams)
    except OSError as error:
        os.write(2, os.fsencode(f"gpuyard: {path} cannot be executed: {error.strerror}\n"))
        sys.exit(CANNOT_EXECUTE)
    for stream in streams:
        os.close(stream.program_end)
    relay = OutputRelay(streams)
    status = relay.run(program, ends)
    if relay.drain() and os.fork() == 0:
        relay.run_to_end()
        status = 0
    os._exit(status)
