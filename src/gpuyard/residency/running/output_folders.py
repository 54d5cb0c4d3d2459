"""What labels become on disk: a folder each under one root, there as a whole or not at all.

- A label is rendered into a folder of its own under `.partial`; one rename makes it `<root>/<name>`. So what has a
  name is complete, and what a run that died left behind is under `.partial`, which the next run empties.
- Nothing that is complete is ever replaced. Where it is not to be kept and gone on from, that is an error at once.
- Labels that were not rendered are lines of `skipped.jsonl`, which each run begins anew, but one that is refused.
- One run at a time has a root: it holds a lock on `.lock`. Any thread may call anything.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running.status_file import Skip

_LOCK, _PARTIAL, _SKIPPED = ".lock", ".partial", "skipped.jsonl"
_SYNC_EVERY_S = 1.0
_ELSEWHERE = "name another folder for outputs (--out)"


class SkipsUnwritten(EnvironmentFault):
    """`skipped.jsonl` is not whole. All that the run skipped is in `skipped`."""

    def __init__(self, fault: EnvironmentFault, skipped: tuple[Skip, ...]) -> None:
        super().__init__(fault.message, hint=fault.hint)
        self.skipped = skipped


class Outputs:
    """`resume`: labels that are complete are kept, and not rendered again."""

    def __init__(self, root: Path, *, resume: bool) -> None:
        self._root, self._is_resumed = root, resume
        self._partial = root / _PARTIAL
        self._numbers = itertools.count(1)
        self._lines = threading.Lock()
        self._skipped: int | None = None
        self._skips: list[Skip] = []
        self._unwritten: list[bytes] = []
        self._synced_at = -math.inf
        with contextlib.ExitStack() as undo, _told(root, "used for outputs"):
            undo.callback(os.close, _locked(root))
            self._there = _entries(root)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._partial)
            self._partial.mkdir()
            self._open_files = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What ended the run is what is told.
        with contextlib.suppress(*([] if error is None else [EnvironmentFault])):
            self.close(was_run=error is None)

    def close(self, *, was_run: bool = True) -> None:
        """SkipsUnwritten where not all that was skipped could be written down. A run has lines of its own, if none."""
        with self._open_files, self._lines:
            self.discard(self._partial)
            self._synced_at = -math.inf
            try:
                self._write_lines(begin=was_run)
            except EnvironmentFault as fault:
                raise SkipsUnwritten(fault, tuple(self._skips)) from fault

    def is_complete(self, label: Label) -> bool:
        """UserError where it cannot be put there, or where it is and nobody said to go on from that."""
        name = label.name
        if not name or "/" in name or name.startswith(".") or name == _SKIPPED:
            raise UserError(f"'{name}' cannot be the name of a label's folder", hint="give it a plain name")
        is_folder = self._there.get(name)
        if is_folder is None:
            return False
        if not is_folder:
            raise UserError(f"{self._root / name} is in the way of the label of that name", hint=_ELSEWHERE)
        if not self._is_resumed:
            hint = f"keep what is complete (--resume), or {_ELSEWHERE}"
            raise UserError(f"{self._root / name} is there already", hint=hint)
        return True

    def open(self, label: Label) -> Path:
        """An empty folder that nobody else has. EnvironmentFault where there can be none."""
        folder = self._partial / f"{os.getpid()}-{next(self._numbers)}"
        with _told(self._root / label.name, "made"):
            folder.mkdir()
            with self._lines:
                self._begin_lines()
        return folder

    def commit(self, label: Label, folder: Path) -> None:
        """On disk, and then with its name. EnvironmentFault where it cannot be, and nothing of it is left."""
        path = self._root / label.name
        try:
            with _told(path, "written"):
                _flush(folder)
                folder.rename(path)
        except EnvironmentFault:
            self.discard(folder)
            raise

    def discard(self, folder: Path) -> None:
        """What cannot be removed now is removed by the next run."""
        shutil.rmtree(folder, ignore_errors=True)

    def skip(self, skip: Skip) -> None:
        """A line of `skipped.jsonl`; where the disk is full, with the next one, or when all is over.

        After a power failure the last lines may be missing: such labels are tried again anyway.
        """
        with self._lines:
            self._skips.append(skip)
            self._unwritten.append(_line_of(skip))
            with contextlib.suppress(EnvironmentFault):
                self._write_lines()

    def _begin_lines(self) -> int:
        """The last run's lines go when this one does something, and not where it is refused."""
        if self._skipped is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._skipped = os.open(self._root / _SKIPPED, flags, 0o666)
            self._open_files.callback(os.close, self._skipped)
        return self._skipped

    def _write_lines(self, *, begin: bool = False) -> None:
        """Whole ones only."""
        with _told(self._root / _SKIPPED, "written"):
            if begin:
                self._begin_lines()
            while self._unwritten:
                _append(self._begin_lines(), self._unwritten[0])
                del self._unwritten[0]
            # A broken scene may cost a hundred thousand labels at once: each line on its own would take minutes.
            if self._skipped is not None and time.monotonic() >= self._synced_at + _SYNC_EVERY_S:
                os.fsync(self._skipped)
                self._synced_at = time.monotonic()


def check_outputs(root: Path, units: Iterable[Unit], *, resume: bool) -> None:
    """Raises what a run would raise at its beginning: before anybody waits for a device."""
    outputs = Outputs(root, resume=resume)
    try:
        for unit in units:
            for label in unit.labels:
                outputs.is_complete(label)
    finally:
        outputs.close(was_run=False)


@contextlib.contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be {what}: {error.strerror}") from error


def _locked(root: Path) -> int:
    """Held while this process lives. A file, as folders on network file systems cannot be locked."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{root} cannot be a folder: there is a file of that name", hint=_ELSEWHERE) from None
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            hint = f"wait for it, or {_ELSEWHERE}"
            raise EnvironmentFault(f"another run has its outputs in {root}", hint=hint) from None
        raise
    return descriptor


def _entries(root: Path) -> dict[str, bool]:
    """What is there already, and whether it is a folder."""
    with os.scandir(root) as entries:
        return {entry.name: entry.is_dir() for entry in entries}


def _flush(folder: Path) -> None:
    """To disk: what is in it, and then itself, so that after a power failure a name stands for all of it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _flush(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                _sync(entry.path)
    _sync(folder)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line_of(skip: Skip) -> bytes:
    try:
        return msgspec.json.encode(skip) + b"\n"
    except UnicodeEncodeError:  # a file's name that is not UTF-8, in a message about it
        return json.dumps(msgspec.to_builtins(skip)).encode() + b"\n"


def _append(descriptor: int, line: bytes) -> None:
    """All of it, or the file is as it was."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        raise
