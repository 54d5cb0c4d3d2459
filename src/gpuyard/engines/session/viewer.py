"""The viewer, the program in a session's pane, which shows a task and forwards keys and the size of the window; the
sockets by which the task's runner serves viewers; and the event loop of the runner.

When the viewer's terminal hangs up, either a person closed the session, which ends the task, or tmux died, which must
not end it. A silent connection to tmux's server tells them apart: a killed server drops it, and one that was asked to
exit sends something; if it stays open, the session was closed.

A slow viewer never blocks the task. One that falls more than 1 MB behind skips output: when it has received what was
sent, it gets a line that says so and the last part again, as a new viewer does."""

import contextlib
import heapq
import itertools
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.system.processes import python_command
from gpuyard.system.wakeable_poll import open_signal_pipe


class Loop:
    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def watch(self, descriptor: int, handler: Callable[[int], object]) -> None:
        self._poll.register(descriptor, select.POLLIN)
        self._handlers[descriptor] = handler

    def want_to_write(self, descriptor: int, *, wants: bool) -> None:
        self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if wants else 0))

    def forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), action))

    def turn(self) -> None:
        timeout_ms = None
        if self._timers:  # poll cuts off fractions of a millisecond
            timeout_ms = max(0.0, (self._timers[0][0] - time.monotonic()) * 1000 + 1)
        for descriptor, event in self._poll.poll(timeout_ms):
            handler = self._handlers.get(descriptor)  # an earlier handler may have removed it
            if handler is not None:
                handler(event)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()


OUTPUT, END, KEYS, SIZE, CLOSED = b"oekxc"
SIZE_FORMAT = "!HH"
_HEAD = struct.Struct("!BI")
CHUNK = 1 << 16
_KILLED = 128 + signal.SIGKILL
_ANSWERS_WITHIN_S = 1.0
# The status request (DSR) and its answer "OK". Every terminal answers it after everything written before it.
_ASKS_TERMINAL, _TERMINAL_ANSWERS = b"\x1b[5n", b"\x1b[0n"


def command(sockets: str, key: str) -> tuple[str, ...]:
    return python_command("gpuyard.engines.session.viewer", sockets, key)


def frame(kind: int, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


class FrameDecoder:
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
        self._runner, self._server, self._signal_pipe = runner, server, signal_pipe
        self._frames = FrameDecoder()
        self._status: int | None = None

    def run(self) -> int:
        """Show the task until it ends. Return its status, which tmux shows below the last screen."""
        try:
            self._send_size()
            while self._status is None:
                ready, _, _ = select.select([self._runner.fileno(), self._signal_pipe, 0], [], [])
                if self._signal_pipe in ready:
                    if signal.SIGHUP in os.read(self._signal_pipe, 64):
                        raise HungUp
                    self._send_size()
                if self._runner.fileno() in ready:
                    self._show()
                if 0 in ready:
                    keys = b""
                    with contextlib.suppress(OSError):
                        keys = os.read(0, CHUNK)
                    if not keys:
                        raise HungUp
                    self._send(frame(KEYS, keys))
            with contextlib.suppress(OSError):
                _await_shown()
        except HungUp:
            # A server that lives sends nothing. Without a connection that is unknown, and no task is ended by mistake.
            if self._server is not None and not select.select([self._server], [], [], _ANSWERS_WITHIN_S)[0]:
                self._send(frame(CLOSED))
                self._runner.settimeout(10.0)
                while _receive(self._runner):  # until the runner has received it: data of an exited sender may be lost
                    pass
        return self._status or 0

    def _show(self) -> None:
        received = _receive(self._runner)
        if not received:
            _write(b"\r\n[this task was killed, or its runner was; see `gpuyard show`]\r\n")
            self._status = _KILLED
        for kind, content in self._frames.feed(received):
            _write(content if kind == OUTPUT else content[1:])
            if kind == END:
                self._status = content[0]

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
    with contextlib.suppress(OSError):
        return link.recv(CHUNK)
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


_REMEMBERED = 1 << 18

# Called with the content of frames that viewers send, by the kind of frame.
Handlers: TypeAlias = Mapping[int, Callable[[bytes], object]]


class ViewerSockets:
    def __init__(self, loop: Loop, folder: str, key: str, handlers: Handlers, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when the last viewer disconnects without a report that it was closed. Raises OSError."""
        self._loop, self._handlers, self._on_gone = loop, handlers, on_gone
        self._path = f"{folder}/{key}.sock"
        self._listener = user_sockets.bind(self._path)
        self._listener.listen(8)
        self._listener.settimeout(0)
        self.viewers: dict[int, _ViewerConnection] = {}
        self._recent = bytearray()
        self._had_viewer = False
        loop.watch(self._listener.fileno(), self._accept)

    def show(self, output: bytes) -> None:
        self._recent += output
        if len(self._recent) > 2 * _REMEMBERED:
            del self._recent[:-_REMEMBERED]
        for each in list(self.viewers.values()):
            each.send(OUTPUT, output)
            self._push(each)

    def end(self, status: int, text: str, wait_s: float) -> None:
        """Send the end to all viewers. Wait up to `wait_s` for the first: a task may end before its session is up."""
        if not self._had_viewer:
            select.select([self._listener.fileno()], [], [], wait_s)
        self._accept(select.POLLIN)
        deadline = time.monotonic() + 2.0
        for each in self.viewers.values():
            each.end(bytes([status]) + os.fsencode(text), self._recent_output(), deadline)
        self.viewers.clear()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _accept(self, _: int) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # the viewer is gone already, or the limit on open files is reached
            return
        if not user_sockets.is_same_user(link):
            link.close()
            return
        self._had_viewer = True
        connection = _ViewerConnection(link)
        self.viewers[link.fileno()] = connection
        self._loop.watch(link.fileno(), lambda event: self._serve(connection, event))
        connection.send(OUTPUT, self._recent_output())
        self._push(connection)

    def _serve(self, connection: "_ViewerConnection", event: int) -> None:
        if event & select.POLLOUT:
            self._push(connection)
        if not event & ~select.POLLOUT:
            return
        received = b""
        try:
            received = connection.link.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            pass
        is_closed = False
        for kind, content in connection.frames.feed(received):
            is_closed = is_closed or kind == CLOSED
            if kind in self._handlers:
                self._handlers[kind](content)
        if is_closed or not received:
            self._loop.forget(connection.link.fileno())
            del self.viewers[connection.link.fileno()]
            connection.link.close()
        if not received and not self.viewers:
            self._on_gone()

    def _push(self, connection: "_ViewerConnection") -> None:
        with contextlib.suppress(OSError):  # it is full; or the viewer is gone, which reading notices
            del connection.unsent[: connection.link.send(connection.unsent)]
        if connection.is_behind and not connection.unsent:
            connection.catch_up(self._recent_output())
        self._loop.want_to_write(connection.link.fileno(), wants=bool(connection.unsent))

    def _recent_output(self) -> bytes:
        """Return the last output from the start of a line: half an escape sequence would be shown as text."""
        last = bytes(self._recent[-_REMEMBERED:])
        return last if len(last) == len(self._recent) else last[last.find(b"\n") + 1 :]


class _ViewerConnection:
    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.frames = FrameDecoder()
        self.unsent = bytearray()
        self.is_behind = False

    def send(self, kind: int, content: bytes) -> None:
        if not self.is_behind:
            self.unsent += frame(kind, content)
            self.is_behind = len(self.unsent) > 1 << 20

    def end(self, content: bytes, recent_output: bytes, deadline: float) -> None:
        if self.is_behind:
            self.catch_up(recent_output)
        self.unsent += frame(END, content)
        with contextlib.suppress(OSError):
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            self.link.sendall(self.unsent)
        self.link.close()

    def catch_up(self, recent_output: bytes) -> None:
        self.is_behind = False
        text = b"\r\n[some of the output is left out here; the log has all of it]\r\n"
        self.unsent += frame(OUTPUT, text + recent_output)
