"""Those who look at a task: viewers that connect to its socket. None of them ever holds it up.

A new one is shown the last of what the task wrote, and so is one that has fallen far behind, when it has taken what it
was sent: what lies between is left out, and it is told so.
"""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from gpuyard.engines.session import viewer
from gpuyard.engines.session.poll_loop import Loop

_REMEMBERED = 1 << 18
_FAR_BEHIND = 1 << 20
_CHUNK = 1 << 16
_LAST_WORDS_WITHIN_S = 2.0
_LEFT_OUT = b"\r\n[some of the output is left out here; the log has all of it]\r\n"


class Listeners(NamedTuple):
    """Who is told of what viewers do. `gone`: the last one is, without having said that it was closed by hand."""

    keys: Callable[[bytes], object]
    size: Callable[[int, int], object]
    closed: Callable[[], object]
    gone: Callable[[], object]


class ViewerSockets:
    def __init__(self, loop: Loop, folder: str, key: str, listeners: Listeners) -> None:
        """OSError where there can be no socket."""
        self._loop = loop
        self._listeners = listeners
        self._path = f"{folder}/{key}.sock"
        self._door = _listen(folder, f"{key}.sock")
        self._viewers: dict[int, _Viewer] = {}
        self._last = bytearray()
        self._is_awaited = True
        loop.watch(self._door.fileno(), self._let_in)

    @property
    def is_empty(self) -> bool:
        return not self._viewers

    def show(self, output: bytes) -> None:
        self._last += output
        if len(self._last) > 2 * _REMEMBERED:
            del self._last[:-_REMEMBERED]
        for each in list(self._viewers.values()):
            each.send(viewer.OUTPUT, output)
            self._push(each)

    def end(self, status: int, text: str, patience_s: float) -> None:
        """Waits so long for the first one to come: a task may end before its session can show it."""
        if self._is_awaited:
            select.select([self._door.fileno()], [], [], patience_s)
        self._let_in(select.POLLIN)
        deadline = time.monotonic() + _LAST_WORDS_WITHIN_S
        for each in self._viewers.values():
            each.end(bytes([status]) + os.fsencode(text), self._remembered(), deadline)
        self._viewers.clear()
        self._door.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _let_in(self, _: int) -> None:
        try:
            link, _ = self._door.accept()
        except OSError:  # nobody waits any more, or no more files can be opened
            return
        self._is_awaited = False
        newcomer = _Viewer(link)
        self._viewers[link.fileno()] = newcomer
        self._loop.watch(link.fileno(), lambda event: self._attend(newcomer, event))
        newcomer.send(viewer.OUTPUT, self._remembered())
        self._push(newcomer)

    def _attend(self, one: "_Viewer", event: int) -> None:
        if event & select.POLLOUT:
            self._push(one)
        if event & ~select.POLLOUT:
            self._hear(one)

    def _hear(self, one: "_Viewer") -> None:
        try:
            news = one.link.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            news = b""
        is_closed = False
        for kind, content in one.frames.take(news):
            is_closed = is_closed or kind == viewer.CLOSED
            self._pass_on(kind, content)
        if is_closed or not news:
            self._part_with(one)
        if not news and not self._viewers:
            self._listeners.gone()

    def _pass_on(self, kind: int, content: bytes) -> None:
        if kind == viewer.KEYS:
            self._listeners.keys(content)
        elif kind == viewer.SIZE:
            self._listeners.size(*struct.unpack(viewer.SIZE_FORMAT, content))
        elif kind == viewer.CLOSED:
            self._listeners.closed()

    def _push(self, one: "_Viewer") -> None:
        """Of one that is gone we hear when it is read from."""
        with contextlib.suppress(OSError):
            one.push(self._remembered)
        self._loop.want_to_write(one.link.fileno(), wants=bool(one.unsent))

    def _part_with(self, one: "_Viewer") -> None:
        self._loop.forget(one.link.fileno())
        del self._viewers[one.link.fileno()]
        one.link.close()

    def _remembered(self) -> bytes:
        """From the beginning of a line: half a sequence of control characters would be shown as text."""
        last = bytes(self._last[-_REMEMBERED:])
        return last if len(last) == len(self._last) else last[last.find(b"\n") + 1 :]


class _Viewer:
    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.frames = viewer.Unframed()
        self.unsent = bytearray()
        self._is_behind = False

    def send(self, kind: int, content: bytes) -> None:
        if not self._is_behind:
            self.unsent += viewer.frame(kind, content)
            self._is_behind = len(self.unsent) > _FAR_BEHIND

    def push(self, remembered: Callable[[], bytes]) -> None:
        with contextlib.suppress(BlockingIOError):
            del self.unsent[: self.link.send(self.unsent)]
        if self._is_behind and not self.unsent:
            self._catch_up(remembered())

    def end(self, content: bytes, remembered: bytes, deadline: float) -> None:
        if self._is_behind:
            self._catch_up(remembered)
        self.unsent += viewer.frame(viewer.END, content)
        with contextlib.suppress(OSError):
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            self.link.sendall(self.unsent)
        self.link.close()

    def _catch_up(self, remembered: bytes) -> None:
        self._is_behind = False
        self.unsent += viewer.frame(viewer.OUTPUT, _LEFT_OUT + remembered)


def _listen(folder: str, name: str) -> socket.socket:
    """By a relative name: a socket's address has no room for a long path."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    try:
        os.chdir(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        door.bind(name)
        door.listen(8)
        door.settimeout(0)
    except OSError:
        door.close()
        raise
    finally:
        os.fchdir(here)
        os.close(here)
    return door
