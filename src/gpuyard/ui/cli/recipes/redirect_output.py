"""Standard output and standard error while code of the user runs, which may print anything.

- A closed standard error never fails a run: output to it is discarded.
- With `--json`, standard output contains the answer only; everything else that is printed goes to standard error.
"""

import atexit
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def discard(descriptor: int) -> None:
    """Send everything written to the descriptor to /dev/null, also from C code and child processes."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, descriptor)
    os.close(null)


class _Errors(io.FileIO):
    """Standard error that discards output once a write fails: reader or terminal gone, or disk full. It then discards
    standard output too if that is the same file: renderers that print would fail their labels."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            printed = sys.__stdout__
            if printed is not None and os.path.sameopenfile(printed.fileno(), self.fileno()):
                discard(printed.fileno())
            discard(self.fileno())
            return memoryview(data).nbytes


@contextlib.contextmanager
def forgiving_errors() -> Iterator[None]:
    before = sys.stderr
    raw = _Errors(before.fileno(), "w", closefd=False)
    buffered = io.BufferedWriter(raw)
    errors = io.TextIOWrapper(buffered, encoding=before.encoding, errors=before.errors, line_buffering=True)
    sys.stderr = errors
    try:
        yield
    finally:
        errors.flush()
        sys.stderr = before


@contextlib.contextmanager
def reserve_stdout(*, as_json: bool) -> Iterator[None]:
    """With `as_json`, send what is printed inside the block to standard error. Output of C code and child processes
    goes there afterwards too: the C library may flush it at exit."""
    if not as_json:
        yield
        return
    printed = sys.stdout
    printed.flush()
    answer = os.fdopen(os.dup(printed.fileno()), "w", encoding=printed.encoding, errors=printed.errors)
    os.dup2(sys.stderr.fileno(), printed.fileno())
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # code of the user may still hold it
            printed.flush()
        sys.stdout = answer
        atexit.register(_close, answer)


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # a closed pipe was reported when the answer was written
        file.close()
