"""Move runs without a single frame from the output root to the prune root, on the same file system.

- A run stays if it has anything that might be data, and if it cannot be moved, such as one with a mount in it.
- It is moved by a single rename onto a folder without permissions that reserves the new name, after a line in the
  record names its new path. After a kill at any point, the same call completes the move. Nothing is overwritten."""

import contextlib
import errno
import itertools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from msgspec import Struct, convert, to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system.folder_tree import FolderTree, raise_it
from gpuyard.system.private_files import PrivateFileError, open_to_append, read_own
from gpuyard.system.write_files import sync

ANY_FILE = "*"


class PrunedRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A move. `left` is the reason that the run was not moved; `to` is then None."""

    run: str
    to: str | None
    why: str
    left: str | None = None


def make_roots(output: Path, pruned: Path | None, *, is_mover: bool = True) -> None:
    """Create both folders and check that they can be written. `is_mover`: gpuyard moves runs from one to the other."""
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
        if is_mover and os.stat(output).st_dev != os.stat(pruned).st_dev:
            raise UserError(f"the prune root {pruned} is on another file system than the output root", hint=hint)


def has_frame(run: Path, pattern: str) -> bool:
    """Whether the run has a file that is not empty and matches the pattern, with its path if that has a `/`. Links, and
    entries that are neither a file nor a folder, count as data: their content is unknown. Raises EnvironmentFault if
    something is mounted in the run."""
    try:
        if run.is_symlink():
            return True
        globs = tuple(glob for glob in pattern.split("/") if glob not in ("", "."))
        with FolderTree(run) as tree:
            for entry in tree.walk(raise_it):
                parts = tuple(entry.path.split("/")) if "/" in pattern else (entry.name,)
                is_file = stat.S_ISREG(entry.status.st_mode)
                if not entry.is_folder and (not is_file or (entry.status.st_size > 0 and _matches(parts, globs))):
                    return True
            return False
    except OSError as error:
        hint = "it is not pruned; check its permissions"
        raise EnvironmentFault(f"cannot look for frames in {run}: {_describe(error)}", hint=hint) from error


def prune(  # noqa: PLR0913 - the facts of a move
    run: Path, pruned: Path, record: Path, *, why: str, at: str, is_new: bool = False
) -> PrunedRun:
    """Move the run into the prune root, or leave it with a reason; the record gets a line in both cases."""
    run, pruned = run.absolute(), pruned.absolute()
    moved = partial(PrunedRun, run=run.name, why=why)
    try:
        if is_new or (target := _complete_earlier_move(run, pruned, record)) is None:
            target = _move(run, pruned, lambda to: _append(record, moved(to=str(to)), at))
        return moved(to=str(target))
    except (OSError, PrivateFileError) as error:
        left = moved(to=None, left=_describe(error) if isinstance(error, OSError) else error.message)
        with contextlib.suppress(OSError, PrivateFileError):
            _append(record, left, at)
        return left


def read_record(record: Path) -> dict[str, PrunedRun]:
    """Return the last line of each run, by its name. A line that a crash cut off is skipped."""
    try:
        return {line.run: line for line in _lines(record)}
    except (OSError, PrivateFileError) as error:
        why = error.strerror if isinstance(error, OSError) else error.message
        raise EnvironmentFault(f"cannot read the record {record}: {why}", hint="check its permissions") from error


def _complete_earlier_move(run: Path, pruned: Path, record: Path) -> Path | None:
    """Complete the move of an earlier call that was killed. Return None if the run must be moved again."""
    lines = [line for line in _lines(record, run.name) if line.run == run.name and line.to]
    target = Path(lines[-1].to or "") if lines else None
    if target is None or os.path.realpath(target.parent) != os.path.realpath(pruned):
        return None
    if not os.path.lexists(run):
        return target if os.path.lexists(target) else None
    with contextlib.suppress(OSError):
        mode = os.lstat(target).st_mode
        # It is reserved. Only the permissions count: in a setgid folder, a new folder inherits that bit.
        if stat.S_ISDIR(mode) and not mode & 0o777:
            os.rmdir(target)
    return None


def _move(run: Path, pruned: Path, note: Callable[[Path], None]) -> Path:
    """Rename the run to an unused name in the prune root, after `note` was called with it."""
    if not pruned.is_dir():
        raise OSError(errno.ENOENT, f"the prune root {pruned} is missing")
    if not stat.S_ISDIR(os.lstat(run).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(run))
    with FolderTree(run) as tree:
        tree.paths()  # raises Mounted if something is mounted in it
    for number in itertools.count(1):
        target = pruned / (run.name if number == 1 else f"{run.name}.{number}")
        if os.path.lexists(target):
            continue
        note(target)
        try:
            os.mkdir(target, 0)
            os.rename(run, target)
        except FileExistsError:
            continue
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(target)
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            break
    return target


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
            # Many random bytes: a full file system can store a few in the inode, or zeros as a hole.
            trial.write(os.urandom(64 * 1024))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        raise EnvironmentFault(f"cannot write to the {role} {root}: {error.strerror}", hint=hint) from error


def _matches(parts: tuple[str, ...], globs: tuple[str, ...]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_matches(parts[skipped:], globs[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])


def _append(record: Path, moved: PrunedRun, at: str) -> None:
    """Append a line and sync it to disk. Ends a line that a crash cut off first."""
    text = json.dumps({**to_builtins(moved), "at": at}).encode() + b"\n"
    is_new = not record.exists()
    try:
        descriptor = open_to_append(str(record), 0o644)
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
            sync(record.parent)
    except OSError as error:
        raise OSError(error.errno, f"the record cannot be written: {error.strerror}", str(record)) from error


def _lines(record: Path, name: str = "") -> Iterator[PrunedRun]:
    """Yield the lines that contain the name. Uses `json`, because msgspec rejects paths that are not UTF-8."""
    needle = json.dumps(name)[1:-1].encode()
    try:
        lines = read_own(str(record)).split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        if needle in line:
            with contextlib.suppress(ValueError):  # cut off, or not a line of gpuyard
                yield convert(json.loads(line), PrunedRun)


def _describe(error: OSError) -> str:
    where = error.filename2 or error.filename
    return f"{error.strerror or error}" + (f" ({where})" if where else "")
