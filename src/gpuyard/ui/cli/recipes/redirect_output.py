"""Standard output and standard error while code of the user's runs, which may print whatever it likes.

- A standard error that nobody reads any more holds nothing up: what is written there is lost, and that is all.
- With `--json`, standard output is the answer and nothing else: all that is printed goes to standard error.
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


def lose(descriptor: int) -> None:
    """Whatever is written there from now on, also by C code and by children."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Errors(io.FileIO):
    """A pipe's reader may go away, and a terminal; a disk may be full."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            self._lose()
            return memoryview(data).nbytes

    def _lose(self) -> None:
        """Standard output as well where it is the same: each label whose renderer prints would fail by that."""
        printed = sys.__stdout__
        if printed is not None and os.path.sameopenfile(printed.fileno(), self.fileno()):
            lose(printed.fileno())
        lose(self.fileno())


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
def only_the_answer(*, as_json: bool) -> Iterator[None]:
    """What is printed inside goes to standard error where the answer is JSON.

    What C code and children print stays there afterwards: the C library may write it when the process ends.
    """
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
        with contextlib.suppress(OSError):  # of somebody who kept it
            printed.flush()
        sys.stdout = answer
        atexit.register(_close, answer)


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # a closed pipe was reported when the answer was written
        file.close()
