"""The output folders of labels under one root: each is complete or absent.

- A label is rendered into its own folder under `.partial`, which the next run empties, and a single rename makes it
  `<root>/<name>`. A complete output is never replaced.
- Labels that were not rendered are lines of `skipped.jsonl`. Each run truncates it, but not a run that is refused.
- Symbolic links with the names of these files are not followed: other users may be able to write to the root.
- A run holds a lock on `.lock`, so a root has one run at a time. All methods may be called from any thread."""

import contextlib
import fcntl
import itertools
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render.planning.assets_and_units import Label, Unit
from gpuyard.recipes.render.status_file import Skip, as_json
from gpuyard.system.folder_tree import FolderTree, raise_it, remove_tree

_MOST_WAITING = 32  # finished labels that are not on disk yet; a worker waits if there are more


class OutputWriters:
    """Threads that sync and name outputs while workers render: many syncs at once wait for one write of the file
    system's journal. Used in a `with` block, whose end waits for all writes and raises their first error."""

    def __init__(self) -> None:
        # On a disk that is busy with reads, 8 are too few for 75 labels per second (ADR 87).
        self._pool = ThreadPoolExecutor(16, "gpuyard-write")
        self._free = threading.Semaphore(_MOST_WAITING)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown()
        if error is None and self._failure is not None:
            raise self._failure

    def write(self, act: Callable[[], object]) -> None:
        """Call `act` in another thread. Waits while too many writes are pending. Raises the error of an earlier one."""
        self._free.acquire()
        if self._failure is not None:
            self._free.release()
            raise self._failure
        self._pool.submit(self._call, act)

    def _call(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in a worker, or at the end
            self._failure = error
        finally:
            self._free.release()


_LOCK, _PARTIAL, _SKIPPED = ".lock", ".partial", "skipped.jsonl"
_OTHER_FOLDER = "name another folder for outputs (--out)"


class SkipsUnwritten(EnvironmentFault):
    """`skipped.jsonl` is incomplete. `skipped` has all skips of the run."""

    def __init__(self, fault: EnvironmentFault, skipped: tuple[Skip, ...]) -> None:
        super().__init__(fault.message, hint=fault.hint)
        self.skipped = skipped


class Outputs:
    """`resume`: complete labels are kept, and not rendered again. `skips` are all skips of the run."""

    def __init__(self, root: Path, *, resume: bool) -> None:
        self._root, self._is_resumed = root, resume
        self._partial = root / _PARTIAL
        self._numbers = itertools.count(1)
        self._lines = threading.Lock()
        self._skipped: int | None = None
        self.skips: list[Skip] = []
        self._unwritten: list[bytes] = []
        self._synced_at = -math.inf
        with contextlib.ExitStack() as undo, _reported(root, "used for outputs"):
            undo.callback(os.close, _lock_root(root))
            with os.scandir(root) as entries:
                self._existing = {entry.name: entry.is_dir() for entry in entries}  # whether each is a folder
            for problem in remove_tree(self._partial):
                raise problem
            self._partial.mkdir()
            self._open_files = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The error that ended the run goes first.
        with contextlib.suppress(*([] if error is None else [EnvironmentFault])):
            self.close(was_run=error is None)

    def close(self, *, was_run: bool = True) -> None:
        """Raises SkipsUnwritten if not all skips could be written. After a run, `skipped.jsonl` has its skips only."""
        with self._open_files, self._lines:
            self.discard(self._partial)
            self._synced_at = -math.inf
            try:
                self._write_lines(truncate=was_run)
            except EnvironmentFault as fault:
                raise SkipsUnwritten(fault, tuple(self.skips)) from fault

    def is_complete(self, label: Label) -> bool:
        """Return whether the output exists. Raises UserError if it cannot exist, or if it exists without `resume`."""
        name = label.name
        if not name or "/" in name or name.startswith(".") or name == _SKIPPED:
            raise UserError(f"'{name}' cannot be the name of a label's folder", hint="give it a plain name")
        is_folder = self._existing.get(name)
        if is_folder is None:
            return False
        if not is_folder:
            raise UserError(f"{self._root / name} is a file: the label '{name}' needs a folder", hint=_OTHER_FOLDER)
        if not self._is_resumed:
            hint = f"keep complete outputs (--resume), or {_OTHER_FOLDER}"
            raise UserError(f"{self._root / name} already exists", hint=hint)
        return True

    def open(self, label: Label) -> Path:
        """Return a new empty folder for the renderer. Raises EnvironmentFault if it cannot be created."""
        folder = self._partial / f"{os.getpid()}-{next(self._numbers)}"
        with _reported(self._root / label.name, "created"):
            folder.mkdir()
            with self._lines:
                self._open_skipped()
        return folder

    def commit(self, label: Label, folder: Path) -> None:
        """Sync the folder to disk, then rename it. Raises EnvironmentFault and removes it if that fails."""
        path = self._root / label.name
        try:
            with _reported(path, "written"):
                _flush(folder)
                folder.rename(path)
        except EnvironmentFault:
            self.discard(folder)
            raise

    def discard(self, folder: Path) -> None:
        """Remove the folder. If that fails, the next run removes it."""
        with contextlib.suppress(OSError):
            remove_tree(folder)

    def skip(self, skip: Skip) -> None:
        """Append a line to `skipped.jsonl`; if the disk is full, with the next line or at the end of the run."""
        with self._lines:
            self.skips.append(skip)
            self._unwritten.append(as_json(skip) + b"\n")
            with contextlib.suppress(EnvironmentFault):
                self._write_lines()

    def _open_skipped(self) -> int:
        """Open `skipped.jsonl` on first use, which removes the last run's lines; a refused run keeps them."""
        if self._skipped is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._skipped = os.open(self._root / _SKIPPED, flags, 0o666)
            self._open_files.callback(os.close, self._skipped)
        return self._skipped

    def _write_lines(self, *, truncate: bool = False) -> None:
        with _reported(self._root / _SKIPPED, "written"):
            if truncate:
                self._open_skipped()
            while self._unwritten:
                _append(self._open_skipped(), self._unwritten[0])
                del self._unwritten[0]
            # A broken scene may skip a hundred thousand labels at once: syncing each line would take minutes.
            if self._skipped is not None and time.monotonic() >= self._synced_at + 1.0:
                os.fsync(self._skipped)
                self._synced_at = time.monotonic()


def check_outputs(root: Path, units: Iterable[Unit], *, resume: bool) -> None:
    """Raise the errors that a run would raise at its start, before it waits for a device."""
    outputs = Outputs(root, resume=resume)
    try:
        for unit in units:
            for label in unit.labels:
                outputs.is_complete(label)
    finally:
        outputs.close(was_run=False)


@contextlib.contextmanager
def _reported(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be {what}: {error.strerror}") from error


def _lock_root(root: Path) -> int:
    """Lock the root until this process ends. Uses a file, because network file systems cannot lock folders."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{root} cannot be a folder: there is a file of that name", hint=_OTHER_FOLDER) from None
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            hint = f"wait for it, or {_OTHER_FOLDER}"
            raise EnvironmentFault(f"another run writes its outputs to {root}", hint=hint) from None
        raise
    return descriptor


def _flush(folder: Path) -> None:
    """Sync the contents of a folder and then the folder, so that after a power failure a named folder is complete."""
    with FolderTree(folder) as tree:
        for entry in tree.walk(raise_it):
            if entry.is_folder or stat.S_ISREG(entry.status.st_mode):
                descriptor = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry.folder)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        os.fsync(tree.descriptor)


def _append(descriptor: int, line: bytes) -> None:
    """Append the whole line, or restore the file."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        raise
