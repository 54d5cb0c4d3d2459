"""The viewer: what runs in a session's pane. It shows a task and passes on keys and the size of the window.

It is a program of its own, run as `command` says, and speaks with the task's runner at the socket KEY.sock in a folder.
The terminal is raw: what the task writes comes ready for one, and Ctrl-C is a key like any other.

When its terminal goes away, somebody has closed the session, which ends the task; or tmux itself has died, which must
not. It is told apart by a connection to tmux's server that nothing is ever said on. The server does not end of its own
accord while somebody is connected, not even with its last session; so if the connection stays, the session was closed.
A server that was killed loses it, and one that was told to end says something.
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

OUTPUT, END, KEYS, SIZE, CLOSED = b"oekxc"
SIZE_FORMAT = "!HH"
_HEAD = struct.Struct("!BI")
_CHUNK = 1 << 16
_KILLED = 128 + signal.SIGKILL
_SERVER_DIES_WITHIN_MS = 1000
_IS_TAKEN_WITHIN_S = 10.0
_SHOWN_WITHIN_S = 1.0
# "How are you?", which every terminal answers with "well", in the order in which it takes what is written to it.
_ASKS_TERMINAL, _TERMINAL_ANSWERS = b"\x1b[5n", b"\x1b[0n"
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuyard.engines.session.viewer import main; main()"


def isolated(code: str, *arguments: str) -> tuple[str, ...]:
    """Words that run it with this very package, whatever the environment or the directory says of Python."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return sys.executable, "-I", "-c", code, root, *arguments


def command(sockets: str, key: str) -> tuple[str, ...]:
    return isolated(_CODE, sockets, key)


def frame(kind: int, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


class Unframed:
    """Takes bytes as they come, and gives the frames that are complete."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def take(self, news: bytes) -> Iterator[tuple[int, bytes]]:
        self._unread += news
        while len(self._unread) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._unread)
            end = _HEAD.size + length
            if len(self._unread) < end:
                return
            content = bytes(self._unread[_HEAD.size : end])
            del self._unread[:end]
            yield kind, content


class HungUp(Exception):
    """The terminal is gone."""


class Viewer:
    def __init__(self, task: socket.socket, server: socket.socket | None, wire: int) -> None:
        self._task = task
        self._server = server
        self._wire = wire
        self._frames = Unframed()
        self._status: int | None = None

    def run(self) -> int:
        """The task's status, which tmux shows below the last screen."""
        try:
            self._tell_size()
            while self._status is None:
                ready, _, _ = select.select([self._task.fileno(), self._wire, 0], [], [])
                if self._wire in ready:
                    self._heed(os.read(self._wire, 64))
                if self._task.fileno() in ready:
                    self._show()
                if 0 in ready:
                    self._pass_on_keys()
            with contextlib.suppress(OSError):
                _await_shown()
        except HungUp:
            if not self._server_has_died():
                self._say_closed()
        return self._status or 0

    def _heed(self, signums: bytes) -> None:
        if signal.SIGHUP in signums:
            raise HungUp
        self._tell_size()

    def _show(self) -> None:
        news = _received(self._task)
        if not news:
            _write(b"\r\n[this task was killed, or what keeps it; `gpuyard show` tells more]\r\n")
            self._status = _KILLED
        for kind, content in self._frames.take(news):
            _write(content if kind == OUTPUT else content[1:])
            if kind == END:
                self._status = content[0]

    def _pass_on_keys(self) -> None:
        try:
            keys = os.read(0, _CHUNK)
        except OSError:
            keys = b""
        if not keys:
            raise HungUp
        self._say(frame(KEYS, keys))

    def _tell_size(self) -> None:
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(0)
            self._say(frame(SIZE, struct.pack(SIZE_FORMAT, rows, columns)))

    def _say(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # of its end we hear in what it says
            self._task.sendall(content)

    def _server_has_died(self) -> bool:
        """Also where nobody knows: a task is not ended by mistake."""
        if self._server is None:
            return True
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        return bool(poll.poll(_SERVER_DIES_WITHIN_MS))

    def _say_closed(self) -> None:
        """And waits until it is taken: what is said by one who is gone may be lost."""
        self._say(frame(CLOSED))
        self._task.settimeout(_IS_TAKEN_WITHIN_S)
        while _received(self._task):
            pass


def connect(folder: str, name: str) -> socket.socket:
    """By a relative name: a socket's address has no room for a long path."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.chdir(folder)
        link.connect(name)
    except OSError:
        link.close()
        raise
    finally:
        os.chdir("/")
    return link


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(_CHUNK)
    except OSError:
        return b""


def _write(content: bytes) -> None:
    try:
        while content:
            content = content[os.write(1, content) :]
    except OSError:
        raise HungUp from None


def _await_shown() -> None:
    """What is still on its way when we end may be lost: tmux reads no more from a pane whose program is gone."""
    _write(_ASKS_TERMINAL)
    deadline, answers = time.monotonic() + _SHOWN_WITHIN_S, b""
    while _TERMINAL_ANSWERS not in answers and (left := deadline - time.monotonic()) > 0:
        if select.select([0], [], [], left)[0]:
            news = os.read(0, _CHUNK)
            if not news:
                return
            answers += news


def _server_of(tmux: str) -> socket.socket | None:
    """`tmux` is the variable TMUX: the server's socket, its pid and the session's number."""
    path = tmux.rsplit(",", 2)[0]
    try:
        return connect(os.path.dirname(path), os.path.basename(path)) if path else None
    except OSError:
        return None


def _lay_wire() -> int:
    """A descriptor to read the numbers of signals from."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in (signal.SIGHUP, signal.SIGWINCH):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    try:
        before = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSANOW)  # what was typed already is kept
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
    wire = _lay_wire()
    server = _server_of(os.environ.get("TMUX", ""))
    try:
        task = connect(folder, f"{key}.sock")
    except OSError as error:
        sys.exit(f"this task is not to be seen: {error.strerror}")
    with _raw_terminal():
        status = Viewer(task, server, wire).run()
    sys.exit(status)
