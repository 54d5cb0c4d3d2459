"""Serves the viewers that connect to a task's socket. A slow viewer never blocks the task.

A new viewer gets the last part of the task's output. A viewer that falls more than 1 MB behind skips output: when it
has received what was sent, it gets a line that says so and the last part again.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from gpuyard.engines.session.poll_loop import Loop
from gpuyard.engines.session.viewer import CHUNK, CLOSED, END, OUTPUT, FrameDecoder, frame
from gpuyard.system import user_sockets

_REMEMBERED = 1 << 18
_FAR_BEHIND = 1 << 20
_END_SENT_WITHIN_S = 2.0
_LEFT_OUT = b"\r\n[some of the output is left out here; the log has all of it]\r\n"

# Called with the content of frames that viewers send, by the kind of frame.
Handlers: TypeAlias = Mapping[int, Callable[[bytes], object]]


class ViewerSockets:
    def __init__(self, loop: Loop, folder: str, key: str, handlers: Handlers, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when the last viewer disconnects without a report that it was closed.

        Raises OSError if the socket cannot be created.
        """
        self._loop = loop
        self._handlers = handlers
        self._on_gone = on_gone
        self._path = f"{folder}/{key}.sock"
        self._listener = user_sockets.bind(self._path)
        self._listener.listen(8)
        self._listener.settimeout(0)
        self._viewers: dict[int, _ViewerConnection] = {}
        self._recent = bytearray()
        self._had_viewer = False
        loop.watch(self._listener.fileno(), self._accept)

    @property
    def is_empty(self) -> bool:
        return not self._viewers

    def show(self, output: bytes) -> None:
        self._recent += output
        if len(self._recent) > 2 * _REMEMBERED:
            del self._recent[:-_REMEMBERED]
        for each in list(self._viewers.values()):
            each.send(OUTPUT, output)
            self._push(each)

    def end(self, status: int, text: str, wait_s: float) -> None:
        """Send the end to all viewers. Wait up to `wait_s` for the first: a task may end before its session is up."""
        if not self._had_viewer:
            select.select([self._listener.fileno()], [], [], wait_s)
        self._accept(select.POLLIN)
        deadline = time.monotonic() + _END_SENT_WITHIN_S
        for each in self._viewers.values():
            each.end(bytes([status]) + os.fsencode(text), self._recent_output(), deadline)
        self._viewers.clear()
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
        self._viewers[link.fileno()] = connection
        self._loop.watch(link.fileno(), lambda event: self._serve(connection, event))
        connection.send(OUTPUT, self._recent_output())
        self._push(connection)

    def _serve(self, connection: "_ViewerConnection", event: int) -> None:
        if event & select.POLLOUT:
            self._push(connection)
        if event & ~select.POLLOUT:
            self._receive(connection)

    def _receive(self, connection: "_ViewerConnection") -> None:
        try:
            received = connection.link.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        is_closed = False
        for kind, content in connection.frames.feed(received):
            is_closed = is_closed or kind == CLOSED
            if kind in self._handlers:
                self._handlers[kind](content)
        if is_closed or not received:
            self._drop(connection)
        if not received and not self._viewers:
            self._on_gone()

    def _push(self, connection: "_ViewerConnection") -> None:
        with contextlib.suppress(OSError):  # reading notices when the viewer is gone
            connection.push(self._recent_output)
        self._loop.want_to_write(connection.link.fileno(), wants=bool(connection.unsent))

    def _drop(self, connection: "_ViewerConnection") -> None:
        self._loop.forget(connection.link.fileno())
        del self._viewers[connection.link.fileno()]
        connection.link.close()

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
        self._is_behind = False

    def send(self, kind: int, content: bytes) -> None:
        if not self._is_behind:
            self.unsent += frame(kind, content)
            self._is_behind = len(self.unsent) > _FAR_BEHIND

    def push(self, recent_output: Callable[[], bytes]) -> None:
        with contextlib.suppress(BlockingIOError):
            del self.unsent[: self.link.send(self.unsent)]
        if self._is_behind and not self.unsent:
            self._catch_up(recent_output())

    def end(self, content: bytes, recent_output: bytes, deadline: float) -> None:
        if self._is_behind:
            self._catch_up(recent_output)
        self.unsent += frame(END, content)
        with contextlib.suppress(OSError):
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            self.link.sendall(self.unsent)
        self.link.close()

    def _catch_up(self, recent_output: bytes) -> None:
        self._is_behind = False
        self.unsent += frame(OUTPUT, _LEFT_OUT + recent_output)
