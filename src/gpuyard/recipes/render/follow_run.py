"""Looks at a run while it goes on: tells how it stands, writes that to a file each second, and has it stopped.

The file is replaced as a whole, so whoever reads it at any moment finds all of one status. Neither it nor stopping
waits for whoever is shown something, nor ends when that one goes away.
"""

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.residency.running.status_file import RenderStatus

LOOK_EVERY_S = 1.0
UNASKED, UNASKED_AFTER_S = "status.json", 60.0
_GIVE_UP_S = 0.5  # the file may be on a disk that does not answer


class FollowedRun(Protocol):
    """What is followed: a coordinator."""

    def status(self) -> RenderStatus | None: ...

    def stop(self) -> None: ...


class StatusFile:
    """Written once a run has taken `after_s`. Not synced to disk: after a power failure nobody asks how far it was."""

    def __init__(self, path: Path, after_s: float = 0.0) -> None:
        if path.is_dir():
            raise UserError(f"{path} is a folder", hint="name a file for the status, such as status.json")
        if not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent}", hint="make it, or name another file for the status")
        self._path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}")
        self._after_s = after_s

    @classmethod
    def unasked(cls, out: Path) -> "StatusFile":
        """Among the outputs, for a run that takes longer than a minute. One that an earlier run left there is written
        from the beginning, so that it does not tell of that one."""
        path = out / UNASKED
        return cls(path, 0.0 if path.exists() else UNASKED_AFTER_S)

    def write(self, status: RenderStatus) -> None:
        """EnvironmentFault where it cannot be; then the last one stays."""
        if status.elapsed_s < self._after_s:
            return
        try:
            self._beside.write_bytes(_as_json(status))
            self._beside.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._beside.unlink()
            raise EnvironmentFault(f"{self._path} cannot be written: {error.strerror}") from error


def _as_json(status: RenderStatus) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(status)) + b"\n"
    except UnicodeEncodeError:  # a path that is not UTF-8
        return json.dumps(msgspec.to_builtins(status), indent=2).encode() + b"\n"


class _Order(Enum):
    STOP = auto()
    GIVE_UP = auto()
    END = auto()


class Follower:
    """From `with` to its end, in threads of its own. `stop` and `give_up` may be called in a signal handler too.

    `show_stop` is called after the run was stopped: no further label begins when its message appears.
    """

    def __init__(
        self,
        run: FollowedRun,
        show: Callable[[RenderStatus], None],
        file: StatusFile | None,
        show_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._show, self._file, self._show_stop = run, show, file, show_stop
        # Of all that threads can wait for, only this may be used by a handler that interrupts its own use.
        self._orders, self._answers = queue.SimpleQueue[_Order](), queue.SimpleQueue[None]()
        self._is_over = False
        self._is_stopped = False
        self._is_news = threading.Event()  # one of the two has come to be
        self._threads = [
            threading.Thread(target=self._keep, name="gpuyard-status", daemon=True),
            threading.Thread(target=self._keep_showing, name="gpuyard-show", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.put(_Order.END)
        self._is_over = True
        self._is_news.set()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        self._orders.put(_Order.STOP)

    def give_up(self) -> None:
        """The process is about to end, whatever the run does: the file says so, if that can be written in no time."""
        if self._file is not None:
            self._orders.put(_Order.GIVE_UP)
            with contextlib.suppress(queue.Empty):
                self._answers.get(timeout=_GIVE_UP_S)

    def _keep(self) -> None:
        is_to_stop = False
        self._write_down()
        while (order := self._next_order()) not in (_Order.GIVE_UP, _Order.END):
            is_to_stop = is_to_stop or order is _Order.STOP
            if is_to_stop:  # once more each time: it may not have begun before
                self._run.stop()
            if is_to_stop and not self._is_stopped:
                self._is_stopped = True
                self._is_news.set()
            self._write_down()
        if order is _Order.GIVE_UP:
            self._write_down(state="interrupted")
            self._answers.put(None)

    def _next_order(self) -> _Order | None:
        try:
            return self._orders.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            return None

    def _write_down(self, **changes: str) -> None:
        """Where it cannot be, the run goes on, and the next one may be."""
        if self._file is not None and (status := self._run.status()) is not None:
            with contextlib.suppress(EnvironmentFault):
                self._file.write(msgspec.structs.replace(status, **changes))

    def _keep_showing(self) -> None:
        is_stop_shown = False
        while not self._is_over:
            with contextlib.suppress(OSError):  # the terminal or pipe was closed
                if self._is_stopped and not is_stop_shown:
                    is_stop_shown = True
                    self._show_stop()
                if (status := self._run.status()) is not None:  # it has begun
                    self._show(status)
            self._is_news.wait(LOOK_EVERY_S)
            self._is_news.clear()
