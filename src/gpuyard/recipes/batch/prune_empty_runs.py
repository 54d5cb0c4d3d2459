"""Move runs without a single frame from the output root to the prune root.

A *run* is one folder directly in the output root. Rules:
- A run stays if it has anything that might be data.
- A run is removed from the output root only after it is complete in the prune root and a line in the record names its
  new path.
- Nothing is overwritten: a folder without permissions reserves the new name, and the run is renamed onto it.
- After a kill at any point, the same call completes the move: the last line of the record and the files on disk tell
  how far the first call came. Until then a recorded run may still be in the output root, never the other way round.
- A run that cannot be moved stays, and the reason is returned and recorded.
"""

import contextlib
import errno
import filecmp
import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct, convert, to_builtins
from msgspec.structs import asdict

from gpuyard.errors import EnvironmentFault, UserError

ANY_FILE = "*"
# Many random bytes: a file system can store a few in the inode, or zeros as a hole, even when the disk is full.
_TRIAL_BYTES = 64 * 1024


class PrunedRun(Struct, frozen=True, kw_only=True):
    """A move. `left` is the reason that the run, or a part of it, was not moved; `to` is then the path of a complete
    copy, or None."""

    run: str
    to: str | None
    why: str
    left: str | None = None


class _PruneRecord(PrunedRun, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the record. `is_copy`: the run was copied, and exists twice until it is removed from the old place."""

    at: str
    is_copy: bool = False


def make_roots(output: Path, pruned: Path | None) -> None:
    """Create both folders if they are missing, and check that they can be written."""
    if pruned is not None:
        one, other = Path(os.path.realpath(output)), Path(os.path.realpath(pruned))
        hint = "name a folder beside it with --prune-output-root"
        if one == other:
            raise UserError(f"the output root and the prune root are both {one}", hint=hint)
        if one in other.parents:
            raise UserError(f"the prune root {pruned} is inside the output root {output}", hint=hint)
        if other in one.parents:
            raise UserError(f"the output root {output} is inside the prune root {pruned}", hint=hint)
    _make_root("output root", output, "--output-root")
    if pruned is not None:
        _make_root("prune root", pruned, "--prune-output-root")


def has_frame(run: Path, pattern: str) -> bool:
    """Whether the run has a data file: a file that is not empty and matches the pattern. A pattern with a `/` is
    matched with the path inside the run; `**` matches any folders. Symbolic links, and entries that are neither a file
    nor a folder, count as data under any name, because their content is unknown."""
    try:
        return run.is_symlink() or any(_is_frame(entry, run, pattern) for entry in _walk(run))
    except OSError as error:
        hint = "it is not pruned; check its permissions"
        raise EnvironmentFault(f"cannot look for frames in {run}: {_describe(error)}", hint=hint) from error


def prune(  # noqa: PLR0913 - the facts of a move
    run: Path, pruned: Path, record: Path, *, why: str, at: str, is_new: bool = False
) -> PrunedRun:
    """Move the run into the prune root, or leave it with a reason; the record gets a line in both cases. `is_new`: the
    record has no line about this run yet."""
    pruning = _Pruning(run=run.absolute(), pruned=pruned.absolute(), record=record, why=why, at=at)
    try:
        return (None if is_new else pruning.complete_earlier_move()) or pruning.move()
    except OSError as error:
        return pruning.leave(_describe(error))


def read_record(record: Path) -> dict[str, PrunedRun]:
    """Return the last line of each run, by its name. A line that a crash cut off is skipped."""
    try:
        return {line.run: convert(line, PrunedRun, from_attributes=True) for line in _lines(record)}
    except OSError as error:
        message = f"cannot read the record {record}: {error.strerror}"
        raise EnvironmentFault(message, hint="check its permissions") from error


class _Pruning(Struct, frozen=True, kw_only=True):
    run: Path
    pruned: Path
    record: Path
    why: str
    at: str

    def complete_earlier_move(self) -> PrunedRun | None:
        """Complete the move of an earlier call that was killed. Return None if the run must be moved again."""
        lines = [line for line in _lines(self.record, self.run.name) if line.run == self.run.name and line.to]
        if not lines:
            return None
        target = Path(lines[-1].to or "")
        if not os.path.lexists(self.run):
            return self._moved(target) if os.path.lexists(target) else None
        if _is_reserved(target):
            with contextlib.suppress(OSError):
                os.rmdir(target)
        if not lines[-1].is_copy:
            return None
        pairs = _pairs(self.run, target)
        if not _is_whole(pairs):
            return None  # the copy was never completed, or a new run has the name of the old one
        self._note(self._moved(target), is_copy=True)
        return self._remove_original(pairs, target)

    def move(self) -> PrunedRun:
        if not self.pruned.is_dir():
            return self.leave(f"the prune root {self.pruned} is missing")
        status = os.lstat(self.run)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.run))
        if status.st_dev == os.stat(self.pruned).st_dev:
            try:
                return self._moved(self._place(self.run))
            except OSError as error:
                if error.errno != errno.EXDEV:  # happens also if two folders of one file system are mounted separately
                    raise
            self._note(self._moved(None, "it is being copied to another file system"))
        return self._copy()

    def leave(self, left: str) -> PrunedRun:
        moved = self._moved(None, left)
        with contextlib.suppress(OSError):
            self._note(moved)
        return moved

    def _place(self, source: Path, *, is_copy: bool = False) -> Path:
        """Rename a complete run, or the complete copy of a run, to an unused name in the prune root."""
        names = itertools.chain([self.run.name], (f"{self.run.name}.{number}" for number in itertools.count(2)))
        free = (self.pruned / name for name in names if not os.path.lexists(self.pruned / name))
        while True:
            target = next(free)
            self._note(self._moved(target), is_copy=is_copy)
            try:
                os.mkdir(target, 0)
                os.rename(source, target)
            except FileExistsError:
                continue
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.rmdir(target)
                if error.errno != errno.ENOTEMPTY:
                    raise
            else:
                return target

    def _copy(self) -> PrunedRun:
        prefix = self._clear_partial()
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=self.pruned))
        try:
            pairs = _pairs(self.run, partial)
            _copy_all(pairs)
            if not _is_whole(pairs):
                raise OSError(errno.EBUSY, "it changed while it was copied", str(self.run))
            target = self._place(partial, is_copy=True)
        except BaseException:
            with contextlib.suppress(OSError):
                _discard(partial)
            raise
        _sync(self.pruned)
        return self._remove_original(pairs, target)

    def _clear_partial(self) -> str:
        """Remove partial copies of this run that killed calls left, and return the prefix of their names. It includes
        a digest of the run's path: another batch may be copying a run of the same name to the same root now."""
        origin = hashlib.sha256(os.fsencode(os.path.realpath(self.run))).hexdigest()[:16]
        prefix = f".{self.run.name}.partial-{origin}-"
        for name in os.listdir(self.pruned):
            if name.startswith(prefix):
                _discard(self.pruned / name)
        return prefix

    def _remove_original(self, pairs: list[tuple[str, str]], target: Path) -> PrunedRun:
        """Remove only what was verified to be at the target, and nothing that was written later."""
        try:
            for here, _ in reversed(pairs):
                (os.rmdir if stat.S_ISDIR(os.lstat(here).st_mode) else os.unlink)(here)
        except OSError as error:
            moved = self._moved(target, f"it was copied to {target}, but cannot be removed here: {_describe(error)}")
            self._note(moved, is_copy=True)
            return moved
        return self._moved(target)

    def _moved(self, to: Path | None, left: str | None = None) -> PrunedRun:
        return PrunedRun(run=self.run.name, to=None if to is None else str(to), why=self.why, left=left)

    def _note(self, moved: PrunedRun, *, is_copy: bool = False) -> None:
        try:
            _append(self.record, _PruneRecord(at=self.at, is_copy=is_copy, **asdict(moved)))
        except OSError as error:
            raise OSError(error.errno, f"the record cannot be written: {error.strerror}", str(self.record)) from error


def _make_root(role: str, root: Path, option: str) -> None:
    hint = f"name another with {option}"
    try:
        os.makedirs(root, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"the {role} {root} cannot be a folder: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise EnvironmentFault(f"cannot create the {role} {root}: {error.strerror}", hint=hint) from error
    try:
        with tempfile.TemporaryFile(dir=root) as trial:
            trial.write(os.urandom(_TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        raise EnvironmentFault(f"cannot write to the {role} {root}: {error.strerror}", hint=hint) from error


def _walk(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries, a folder before its own entries. Symbolic links are not followed."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _is_frame(entry: os.DirEntry[str], run: Path, pattern: str) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return False
    if not entry.is_file(follow_symlinks=False):
        return True
    globs = tuple(glob for glob in pattern.split("/") if glob not in ("", "."))
    parts = Path(entry.path).relative_to(run).parts if "/" in pattern else (entry.name,)
    return _matches(parts, globs) and entry.stat(follow_symlinks=False).st_size > 0


def _matches(parts: tuple[str, ...], globs: tuple[str, ...]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_matches(parts[skipped:], globs[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])


def _pairs(run: Path, other: Path) -> list[tuple[str, str]]:
    """Return the path of the run and of all its entries, each with its counterpart in `other`, folders first."""
    inside = ((entry.path, str(other / Path(entry.path).relative_to(run))) for entry in _walk(run))
    return [(str(run), str(other)), *inside]


def _copy_all(pairs: list[tuple[str, str]]) -> None:
    for here, there in pairs[1:]:
        _copy_one(here, there)
    for here, there in pairs:  # after all copies: a folder's times change when an entry is added
        with contextlib.suppress(PermissionError):  # not every file system stores modes
            shutil.copystat(here, there, follow_symlinks=False)
        if not os.path.islink(there):
            _sync(there)


def _copy_one(here: str, there: str) -> None:
    mode = os.lstat(here).st_mode
    if stat.S_ISDIR(mode):
        os.mkdir(there, 0o700)
    elif stat.S_ISLNK(mode):
        os.symlink(os.readlink(here), there)
    elif stat.S_ISREG(mode):
        shutil.copyfile(here, there, follow_symlinks=False)
    else:
        raise OSError(errno.EINVAL, "neither a file nor a folder, and cannot be copied", here)


def _is_whole(pairs: list[tuple[str, str]]) -> bool:
    return all(_is_same(here, there) for here, there in pairs)


def _is_same(here: str, there: str) -> bool:
    try:
        one, other = os.lstat(here), os.lstat(there)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_IFMT(one.st_mode) != stat.S_IFMT(other.st_mode):
        return False
    if stat.S_ISDIR(one.st_mode):
        return not os.path.samestat(one, other)  # a folder mounted twice would be removed at both places
    if stat.S_ISLNK(one.st_mode):
        return os.readlink(here) == os.readlink(there)
    return stat.S_ISREG(one.st_mode) and filecmp.cmp(here, there, shallow=False)


def _is_reserved(target: Path) -> bool:
    try:
        mode = os.lstat(target).st_mode
    except OSError:
        return False
    # Only the permissions count: in a setgid folder, a new folder inherits that bit.
    return stat.S_ISDIR(mode) and not mode & 0o777


def _discard(copy: Path) -> None:
    """Remove a copy, read-only folders included."""
    os.chmod(copy, 0o700)
    for folder, names, _ in os.walk(copy):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(copy)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _append(record: Path, line: _PruneRecord) -> None:
    """Append a line and sync it to disk. Ends a line that a crash cut off first."""
    text = json.dumps(to_builtins(line)).encode() + b"\n"
    is_new = not record.exists()
    descriptor = os.open(record, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text
        while text:
            text = text[os.write(descriptor, text) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        _sync(record.parent)


def _lines(record: Path, name: str = "") -> Iterator[_PruneRecord]:
    """Yield the lines that contain the name. Uses `json`, because msgspec rejects paths that are not UTF-8."""
    needle = json.dumps(name)[1:-1].encode()
    try:
        lines = record.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        if needle in line:
            with contextlib.suppress(ValueError):  # cut off, or not a line of gpuyard
                yield convert(json.loads(line), _PruneRecord)


def _describe(error: OSError) -> str:
    where = error.filename2 or error.filename
    return f"{error.strerror or error}" + (f" ({where})" if where else "")
