"""Runs without a single frame are moved out of the way, into a root of their own.

A *run* is one folder directly in the output root. Rules:
- Whatever might be data keeps a run where it is.
- A run is given up only when it is whole at its new place, and after a line in the record has said where that is.
- Nothing is moved over anything. A name is reserved with a folder that nobody can enter, then renamed onto.
- Killed at any point, the same call again comes to a good end: what the record names last and what lies there say how
  far it came. Until then a run may be recorded as moved and still be in the output root, never the other way round.
- What cannot be moved is left, with the reason.
"""

import contextlib
import errno
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
# Random, and many: what a file system can keep beside the name, or as a hole, would not show a full disk.
_TRIAL_BYTES = 64 * 1024
_CHUNK_BYTES = 1024 * 1024


class PrunedRuns(Struct, frozen=True, kw_only=True):
    """`left` says why it, or a part of it, is still where it was; `to` is then where a whole copy is, if anywhere."""

    run: str
    to: str | None
    why: str
    left: str | None = None


class _PruneRecord(PrunedRuns, frozen=True, kw_only=True, omit_defaults=True):
    """Of the record. A copy is at two places for a while: until all of it is removed at the old one."""

    at: str
    is_copy: bool = False


def make_roots(output: Path, pruned: Path | None) -> None:
    """Makes both where they are missing; raises before the first launch."""
    if pruned is not None:
        _refuse_overlap(output, pruned)
    _make_root("output root", output, "--output-root")
    if pruned is not None:
        _make_root("prune root", pruned, "--prune-output-root")


def has_frame(run: Path, pattern: str) -> bool:
    """Whether the run has a single data file: one that is not empty and whose name matches.

    A pattern with a `/` is matched with the path inside the run; `**` stands for any folders. Links, and whatever is
    neither a file nor a folder, count as data under any name: what is behind them is not known.
    """
    try:
        return run.is_symlink() or any(_is_frame(entry, run, pattern) for entry in _walk(run))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot look for frames in {run}: {_in_words(error)}", hint="it is not pruned; see who may read it"
        ) from error


def prune(  # noqa: PLR0913 - what there is to say of a move
    run: Path, pruned: Path, record: Path, *, why: str, at: str, is_new: bool = False
) -> PrunedRuns:
    """Moves the run into the prune root, or leaves it and says why; either is in the record. Of one that `is_new` the
    record is known to have nothing yet."""
    pruning = _Pruning(run=run.absolute(), pruned=pruned.absolute(), record=record, why=why, at=at)
    try:
        return (None if is_new else pruning.finish()) or pruning.move()
    except OSError as error:
        return pruning.leave(_in_words(error))


def read_record(record: Path) -> dict[str, PrunedRuns]:
    """The last line of each run. A line that a crash cut off is passed over."""
    try:
        return {line.run: convert(line, PrunedRuns, from_attributes=True) for line in _lines(record)}
    except OSError as error:
        raise EnvironmentFault(
            f"the record {record} cannot be read: {error.strerror}", hint="see who may read it"
        ) from error


class _Pruning(Struct, frozen=True, kw_only=True):
    run: Path
    pruned: Path
    record: Path
    why: str
    at: str

    def finish(self) -> PrunedRuns | None:
        """Does what an earlier call that was killed had not done yet, where that is all there is to do."""
        lines = [line for line in _lines(self.record, self.run.name) if line.run == self.run.name and line.to]
        if not lines:
            return None
        target = Path(lines[-1].to or "")
        if not os.path.lexists(self.run):
            return self._moved(target) if os.path.lexists(target) else None
        if _is_reserved(target):
            with contextlib.suppress(OSError):
                os.rmdir(target)
        return self._finish_copy(target) if lines[-1].is_copy else None

    def _finish_copy(self, target: Path) -> PrunedRuns | None:
        pairs = _pairs(self.run, target)
        if not _is_whole(pairs):
            return None  # it never came there, or was made anew here; one that is the same to the byte is not missed
        self._note(self._moved(target), is_copy=True)
        return self._give_up(pairs, target)

    def move(self) -> PrunedRuns:
        if not self.pruned.is_dir():
            return self.leave(f"the prune root {self.pruned} is missing")
        if self._device_of_run() == os.stat(self.pruned).st_dev:
            try:
                return self._moved(self._place(self.run))
            except OSError as error:
                if error.errno != errno.EXDEV:  # so it is with a folder that is mounted at two places
                    raise
            self._note(self._moved(None, "it is being copied to another file system"))
        return self._copy()

    def leave(self, left: str) -> PrunedRuns:
        moved = self._moved(None, left)
        with contextlib.suppress(OSError):
            self._note(moved)
        return moved

    def _device_of_run(self) -> int:
        status = os.lstat(self.run)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.run))
        return status.st_dev

    def _place(self, source: Path, *, is_copy: bool = False) -> Path:
        """Renames a whole run, or the whole copy of one, to a free name in the prune root."""
        while True:
            target = self._free_name()
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

    def _free_name(self) -> Path:
        names = itertools.chain([self.run.name], (f"{self.run.name}.{number}" for number in itertools.count(2)))
        return next(self.pruned / name for name in names if not os.path.lexists(self.pruned / name))

    def _copy(self) -> PrunedRuns:
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
        return self._give_up(pairs, target)

    def _clear_partial(self) -> str:
        """Removes what killed calls for this very run had copied, and gives the prefix of such names. Another batch may
        be copying a run of the same name to the same root now."""
        origin = hashlib.sha256(os.fsencode(os.path.realpath(self.run))).hexdigest()[:16]
        prefix = f".{self.run.name}.partial-{origin}-"
        for name in os.listdir(self.pruned):
            if name.startswith(prefix):
                _discard(self.pruned / name)
        return prefix

    def _give_up(self, pairs: list[tuple[str, str]], target: Path) -> PrunedRuns:
        """Removes what was seen to be at the target, and nothing that came later."""
        try:
            for here, _ in reversed(pairs):
                (os.rmdir if stat.S_ISDIR(os.lstat(here).st_mode) else os.unlink)(here)
        except OSError as error:
            moved = self._moved(target, f"it was copied to {target}, but cannot be removed here: {_in_words(error)}")
            self._note(moved, is_copy=True)
            return moved
        return self._moved(target)

    def _moved(self, to: Path | None, left: str | None = None) -> PrunedRuns:
        return PrunedRuns(run=self.run.name, to=None if to is None else str(to), why=self.why, left=left)

    def _note(self, moved: PrunedRuns, *, is_copy: bool = False) -> None:
        try:
            _append(self.record, _PruneRecord(at=self.at, is_copy=is_copy, **asdict(moved)))
        except OSError as error:
            raise OSError(error.errno, f"the record cannot be written: {error.strerror}", str(self.record)) from error


def _refuse_overlap(output: Path, pruned: Path) -> None:
    one, other = Path(os.path.realpath(output)), Path(os.path.realpath(pruned))
    hint = "name a folder beside it with --prune-output-root"
    if one == other:
        raise UserError(f"the output root and the prune root are both {one}", hint=hint)
    if one in other.parents:
        raise UserError(f"the prune root {pruned} is inside the output root {output}", hint=hint)
    if other in one.parents:
        raise UserError(f"the output root {output} is inside the prune root {pruned}", hint=hint)


def _make_root(role: str, root: Path, option: str) -> None:
    hint = f"name another with {option}"
    try:
        os.makedirs(root, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"the {role} {root} cannot be a folder: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise EnvironmentFault(f"the {role} {root} cannot be made: {error.strerror}", hint=hint) from error
    try:
        with tempfile.TemporaryFile(dir=root) as trial:
            trial.write(os.urandom(_TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        raise EnvironmentFault(f"the {role} {root} cannot be written: {error.strerror}", hint=hint) from error


def _walk(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """All that is in it, a folder before what it holds. Links are not followed."""
    ahead = [str(folder)]
    while ahead:
        with os.scandir(ahead.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)


def _is_frame(entry: os.DirEntry[str], run: Path, pattern: str) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return False
    if not entry.is_file(follow_symlinks=False):
        return True
    return _is_named(entry, run, pattern) and entry.stat(follow_symlinks=False).st_size > 0


def _is_named(entry: os.DirEntry[str], run: Path, pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatchcase(entry.name, pattern)
    globs = tuple(glob for glob in pattern.split("/") if glob not in ("", "."))
    return _matches(Path(entry.path).relative_to(run).parts, globs)


def _matches(parts: tuple[str, ...], globs: tuple[str, ...]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_matches(parts[skipped:], globs[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])


def _pairs(run: Path, other: Path) -> list[tuple[str, str]]:
    """The run and all that is in it, each with its place under the other, a folder before what it holds."""
    inside = ((entry.path, str(other / Path(entry.path).relative_to(run))) for entry in _walk(run))
    return [(str(run), str(other)), *inside]


def _copy_all(pairs: list[tuple[str, str]]) -> None:
    for here, there in pairs[1:]:
        _copy_one(here, there)
    for here, there in pairs:  # only now: a folder's times change with what comes into it
        with contextlib.suppress(PermissionError):  # not every file system keeps modes
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
        return not os.path.samestat(one, other)  # one folder at two places would be removed at both
    if stat.S_ISLNK(one.st_mode):
        return os.readlink(here) == os.readlink(there)
    return stat.S_ISREG(one.st_mode) and one.st_size == other.st_size and _has_same_bytes(here, there)


def _has_same_bytes(here: str, there: str) -> bool:
    with open(here, "rb") as one, open(there, "rb") as other:
        while True:
            chunk = one.read(_CHUNK_BYTES)
            if chunk != other.read(_CHUNK_BYTES):
                return False
            if not chunk:
                return True


def _is_reserved(target: Path) -> bool:
    try:
        mode = os.lstat(target).st_mode
    except OSError:
        return False
    # Of the permissions only: in a folder that a group shares, a new one is the group's as well.
    return stat.S_ISDIR(mode) and not mode & 0o777


def _discard(copy: Path) -> None:
    """Also where folders that may not be written were copied."""
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
    """On disk when this returns. A line that a crash cut off is ended first."""
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
    """Those in which the name stands. By the standard library: a path that is not UTF-8 is one that msgspec refuses."""
    needle = json.dumps(name)[1:-1].encode()
    try:
        lines = record.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        if needle in line:
            with contextlib.suppress(ValueError):  # cut off, or not ours
                yield convert(json.loads(line), _PruneRecord)


def _in_words(error: OSError) -> str:
    where = error.filename2 or error.filename
    return f"{error.strerror or error}" + (f" ({where})" if where else "")
