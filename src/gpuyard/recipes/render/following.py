"""Looks at a run while it goes on: tells how it stands, writes that to a file each second, and has it stopped.

The file is replaced as a whole, so whoever reads it at any moment finds all of one status.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.residency.status import Status

LOOK_EVERY_S = 1.0


class Running(Protocol):
    """What is followed: a coordinator."""

    def status(self) -> Status | None: ...

    def stop(self) -> None: ...


class StatusFile:
    """Not synced to disk: after a power failure nobody asks how far it had been."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise UserError(f"{path} is a folder", hint="name a file for the status, such as status.json")
        if not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent}", hint="make it, or name another file for the status")
        self._path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}")

    def write(self, status: Status) -> None:
        """EnvironmentFault where it cannot be; then the last one stays."""
        try:
            self._beside.write_bytes(_as_json(status))
            self._beside.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._beside.unlink()
            raise EnvironmentFault(f"{self._path} cannot be written: {error.strerror}") from error


def _as_json(status: Status) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(status)) + b"\n"
    except UnicodeEncodeError:  # a path that is not UTF-8
        return json.dumps(msgspec.to_builtins(status), indent=2).encode() + b"\n"


class Follower:
    """From `with` to its end, in a thread of its own. `stop` may be called anywhere, in a signal handler too."""

    def __init__(self, run: Running, show: Callable[[Status], None], file: StatusFile | None) -> None:
        self._run, self._show, self._file = run, show, file
        self._called = threading.Event()
        self._is_over = self._is_to_stop = False
        self._thread = threading.Thread(target=self._follow, name="gpuyard-status", daemon=True)
        self.problem: EnvironmentFault | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._called.set()
        self._thread.join()

    def stop(self) -> None:
        self._is_to_stop = True
        self._called.set()

    def _follow(self) -> None:
        while not self._is_over:
            self._look()
            if self._called.wait(LOOK_EVERY_S):
                self._called.clear()
            if self._is_to_stop:
                self._run.stop()

    def _look(self) -> None:
        status = self._run.status()
        if status is None:  # it is about to begin
            return
        self._show(status)
        if self._file is not None:
            try:
                self._file.write(status)
            except EnvironmentFault as problem:  # the run goes on, and the next one may be written
                self.problem = problem
