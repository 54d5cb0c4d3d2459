"""The viewer: the program in a session's pane. It shows a task and forwards keys and the size of the window.

`command` starts it. It talks to the task's runner over the socket KEY.sock in a folder. The terminal is in raw mode:
the task's output is already formatted for a terminal, and Ctrl-C is a key like any other.

When its terminal hangs up, either a person closed the session, which ends the task, or tmux died, which must not end
it. The viewer tells them apart by a silent connection to tmux's server. The server does not exit by itself while a
client is connected, not even after its last session. So if the connection stays open, the session was closed. A killed
server drops the connection, and a server that was asked to exit sends something.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
import tty
from collections.abc import Iterator

from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.system.python_command import python_command
from gpuyard.system.signal_pipe import open_signal_pipe

OUTPUT, END, KEYS, SIZE, CLOSED = b"oekxc"
SIZE_FORMAT = "!HH"
_HEAD = struct.Struct("!BI")
CHUNK = 1 << 16
_KILLED = 128 + signal.SIGKILL
_RECEIVED_WITHIN_S = 10.0
_ANSWERS_WITHIN_S = 1.0
# The status request (DSR) and its answer "OK". Every terminal answers it after everything written before it.
_ASKS_TERMINAL, _TERMINAL_ANSWERS = b"\x1b[5n", b"\x1b[0n"


def command(sockets: str, key: str) -> tuple[str, ...]:
    return python_command("gpuyard.engines.session.viewer", sockets, key)


def frame(kind: int, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


class FrameDecoder:
    """Collects received bytes, and yields the frames that are complete."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[int, bytes]]:
        self._unread += received
        while len(self._unread) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._unread)
            end = _HEAD.size + length
            if len(self._unread) < end:
                return
            content = bytes(self._unread[_HEAD.size : end])
            del self._unread[:end]
            yield kind, content


class HungUp(Exception):
    """The terminal was closed."""


class Viewer:
    def __init__(self, runner: socket.socket, server: socket.socket | None, signal_pipe: int) -> None:
        self._runner = runner
        self._server = server
        self._signal_pipe = signal_pipe
        self._frames = FrameDecoder()
        self._status: int | None = None

    def run(self) -> int:
        """Show the task until it ends. Return its status, which tmux shows below the last screen."""
        try:
            self._send_size()
            while self._status is None:
                ready, _, _ = select.select([self._runner.fileno(), self._signal_pipe, 0], [], [])
                if self._signal_pipe in ready:
                    self._handle_signals(os.read(self._signal_pipe, 64))
                if self._runner.fileno() in ready:
                    self._show()
                if 0 in ready:
                    self._send_keys()
            with contextlib.suppress(OSError):
                _await_shown()
        except HungUp:
            # A server that lives sends nothing. Without a connection that is unknown, and no task is ended by mistake.
            if self._server is not None and not select.select([self._server], [], [], _ANSWERS_WITHIN_S)[0]:
                self._send(frame(CLOSED))
                self._runner.settimeout(_RECEIVED_WITHIN_S)
                while _receive(self._runner):  # until the runner has received it: data of an exited sender may be lost
                    pass
        return self._status or 0

    def _handle_signals(self, signums: bytes) -> None:
        if signal.SIGHUP in signums:
            raise HungUp
        self._send_size()

    def _show(self) -> None:
        received = _receive(self._runner)
        if not received:
            _write(b"\r\n[this task was killed, or its runner was; see `gpuyard show`]\r\n")
            self._status = _KILLED
        for kind, content in self._frames.feed(received):
            _write(content if kind == OUTPUT else content[1:])
            if kind == END:
                self._status = content[0]

    def _send_keys(self) -> None:
        try:
            keys = os.read(0, CHUNK)
        except OSError:
            keys = b""
        if not keys:
            raise HungUp
        self._send(frame(KEYS, keys))

    def _send_size(self) -> None:
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(0)
            self._send(frame(SIZE, struct.pack(SIZE_FORMAT, rows, columns)))

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # reading notices when the runner is gone
            self._runner.sendall(content)


def _connect_to_tmux(path: str) -> socket.socket:
    """Connect to the server that started us. Nothing is sent to it, so its folder may be one that users share."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.settimeout(0)  # a stopped server that has not accepted earlier connections would make us wait
        user_sockets.reach(path, server.connect)
        server.settimeout(None)
    except OSError:
        server.close()
        raise
    return server


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(CHUNK)
    except OSError:
        return b""


def _write(content: bytes) -> None:
    try:
        while content:
            content = content[os.write(1, content) :]
    except OSError:
        raise HungUp from None


def _await_shown() -> None:
    """Wait until the terminal has shown everything: tmux stops reading from a pane when its program exits."""
    _write(_ASKS_TERMINAL)
    deadline, answers = time.monotonic() + _ANSWERS_WITHIN_S, b""
    while _TERMINAL_ANSWERS not in answers and (left := deadline - time.monotonic()) > 0:
        if select.select([0], [], [], left)[0]:
            received = os.read(0, CHUNK)
            if not received:
                return
            answers += received


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    try:
        before = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSANOW)  # keeps the keys that were typed already
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, before)


def main() -> None:
    folder, key = sys.argv[1:]
    os.chdir("/")  # keep no file system busy
    for signum in (signal.SIGHUP, signal.SIGWINCH):
        signal.signal(signum, lambda *_: None)
    signal_pipe, _ = open_signal_pipe()
    path = os.environ.get("TMUX", "").rsplit(",", 2)[0]  # the server's socket, its pid and the session's number
    server = None
    with contextlib.suppress(OSError):
        server = _connect_to_tmux(path) if path else None
    try:
        runner = socket.socket(fileno=user_sockets.connect(f"{folder}/{key}.sock", timeout_s=0).detach())
        runner.settimeout(None)
    except (OSError, EnvironmentFault) as error:
        sys.exit(f"cannot show this task: {error.strerror if isinstance(error, OSError) else error}")
    with _raw_terminal():
        status = Viewer(runner, server, signal_pipe).run()
    sys.exit(status)
