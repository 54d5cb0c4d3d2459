"""`gpuyard.progress(done, total, loss=…)`: a job tells how far it is.

It writes one line into the file that `GPUYARD_PROGRESS` names, as any other language may
(`output/progress_line.py`). Outside a job it does nothing. It imports nothing but small modules, and a process
writes at most twice a second. Several processes may call it: each write replaces the file, and the last one counts.
"""

import atexit
import os
import time

TYPE_CHECKING = False  # importing typing would take longer than everything else here
if TYPE_CHECKING:
    from typing import SupportsFloat

_VARIABLE = "GPUYARD_PROGRESS"
_EVERY_S = 0.5
_last_write = float("-inf")
# The last call that was not written: the process that made it, or 0 if a later one was written; and its arguments.
_unwritten: "tuple[int, str, SupportsFloat, SupportsFloat | None, str, dict[str, SupportsFloat]] | None" = None


def progress(
    done: "SupportsFloat",
    total: "SupportsFloat | None" = None,
    *,
    unit: str = "",
    left: "SupportsFloat | None" = None,
    **figures: "SupportsFloat",
) -> None:
    """Tell how much is done, of how much in total if that is known, and named figures such as `loss=0.12`.

    unit: what is counted, such as `epoch`. left: seconds left, if the program knows better than its speed says.

    Of several calls within half a second the first one is written, and the last one when the program ends. A full disk
    or a file that cannot be written is ignored: no training ends for its progress. Raises TypeError or ValueError if a
    value is no number.
    """
    global _last_write, _unwritten  # noqa: PLW0603 - one file per process
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    named = {**({} if left is None else {"left": left}), **figures}
    now = time.monotonic()
    if now - _last_write < _EVERY_S:
        if _unwritten is None:
            atexit.register(_write_last)
        _unwritten = os.getpid(), path, done, total, unit, named
        return
    _last_write = now
    if _unwritten is not None:
        _unwritten = (0, *_unwritten[1:])
    _write(path, _line(done, total, unit, named))


def _write_last() -> None:
    """Write the last call, if it is of this process: a child that was forked has not made it."""
    if _unwritten is not None and _unwritten[0] == os.getpid():
        _write(_unwritten[1], _line(*_unwritten[2:]))


def _line(done: "SupportsFloat", total: "SupportsFloat | None", unit: str, named: "dict[str, SupportsFloat]") -> bytes:
    words = [_number(done) if total is None else f"{_number(done)}/{_number(total)}"]
    words += [f"unit={_word(unit)}"] if unit else []
    words += [f"{_word(name)}={_number(value)}" for name, value in named.items()]
    return f"{' '.join(words)}\n".encode(errors="replace")


def _number(value: "SupportsFloat") -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _word(text: str) -> str:
    return "_".join(text.replace("=", "_").split())


def _write(path: str, line: bytes) -> None:
    """Replace the file, so that a reader never sees half of a line. In a container the file is a mount, which cannot be
    replaced: it is written in place."""
    own = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    temporary = f"{path}.{own}"
    try:
        _write_in_place(temporary, line)
        os.replace(temporary, path)
    except OSError:
        try:
            if os.path.exists(temporary):
                os.unlink(temporary)
            _write_in_place(path, line)
        except OSError:
            return  # no training ends for its progress


def _write_in_place(path: str, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)
        os.ftruncate(descriptor, len(line))
    finally:
        os.close(descriptor)
