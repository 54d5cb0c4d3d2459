"""Parcels on disk, from the engine's side: what is handed over in one go, and what the supervisors left of it.

A parcel is a folder named by its token, in a folder that the engine and all nodes see. In it are `parcel.json`, all
elements, of which one that is there is whole; `submitted`; and for each element, by its number, what `supervisor.py`
writes and reads. Everything is for its owner alone: environments may hold secrets.

- `N.began` is made by whoever comes first: the supervisor, or the engine, which thereby *voids* the element. So either
  it runs or it never will, whatever else is delayed or lost.
- What cannot be read whole is not there yet.
- A parcel is renamed before it is removed: no supervisor that comes late finds half of it.

Every call may raise an EnvironmentFault. For one thread at a time.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gpuyard.core.job.job import Usage
from gpuyard.engines.local.keeper_journal import StartContext
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Launch

_TRACE = re.compile(r"([0-9]+)\.(began|ended)")
_PARCEL, _SUBMITTED, _VOID = "parcel.json", "submitted", b"void"
# A token never begins like this: such a folder is on its way in or out.
_HIDDEN = "."
_MOST_OUTPUT = 1 << 16
_WRITTEN_WITHIN_S = 30.0


class SubmittedElement(Struct, frozen=True, kw_only=True):
    """As it was written: the attempt's key, where its log is, and what it needs to start."""

    key: str
    log: str
    things: StartContext


class Began(Struct, frozen=True, kw_only=True):
    """`pid` is the supervisor's."""

    at: float
    node: str
    pid: int


class NeverBegan(Enum):
    """The engine came first: it never began, and never will."""

    VOID = "void"


VOID: Literal[NeverBegan.VOID] = NeverBegan.VOID


class Finish(Struct, frozen=True, kw_only=True):
    """`word` is as `journal.outcome_of` reads it; `pid` is the program's, where there was one."""

    word: str
    at: float
    pid: int | None = None
    usage: Usage | None = None


class ElementTrace(Struct, frozen=True, kw_only=True):
    """What is to be seen of an element by now."""

    began: Began | NeverBegan | None = None
    ended: Finish | None = None


class SubmissionDirs:
    """All parcels of one engine, in `folder/parcels`, which is made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute() / "parcels"
        self._seen: dict[str, dict[int, ElementTrace]] = {}

    def path(self, token: str) -> str:
        """The parcel's own folder."""
        return f"{self._folder}/{token}"

    def write(self, token: str, elements: Sequence[tuple[Launch, str]]) -> None:
        """Launches with the paths of their logs. It is on disk, and whole, when this returns."""
        draft = self.path(f"{_HIDDEN}{token}")
        base = elements[0][0].environment
        content = {"environment": base, "elements": [_element(launch, log, base) for launch, log in elements]}
        with _using(self.path(token)):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.mkdir(draft, 0o700)
            try:
                _write(f"{draft}/{_PARCEL}", json.dumps(content).encode("ascii"), is_synced=True)
                os.rename(draft, self.path(token))
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
                raise

    def read(self, token: str) -> tuple[SubmittedElement, ...]:
        """In their order: an element's number is its place."""
        path = f"{self.path(token)}/{_PARCEL}"
        with _using(path), open(path, "rb") as file:
            content = file.read()
        try:
            return tuple(_as_written(each) for each in json.loads(content)["elements"])
        except (ValueError, TypeError, LookupError) as error:
            raise EnvironmentFault(
                f"{path} cannot be understood: {error}",
                hint="what was handed over with it may run or not: see the site",
            ) from error

    def all(self) -> list[str]:
        """The tokens of all that are there. Only before any is written: what a daemon that died left half made or half
        removed is cleared away."""
        with _using(str(self._folder)):
            names = sorted(os.listdir(self._folder)) if self._folder.exists() else []
        for name in names:
            if name.startswith(_HIDDEN):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        return [name for name in names if not name.startswith(_HIDDEN)]

    def forget(self, token: str) -> None:
        """Whatever is in it. One that is not there is no error."""
        self._seen.pop(token, None)
        hidden = self.path(f"{_HIDDEN}{token}")
        with _using(self.path(token)), contextlib.suppress(FileNotFoundError):
            os.rename(self.path(token), hidden)
        # On a network, what somebody has open cannot be removed: the next daemon does it.
        shutil.rmtree(hidden, ignore_errors=True)

    # Marks

    def mark_submitted(self, token: str, known_as: str = "") -> None:
        self._mark(token, _SUBMITTED, known_as.encode("utf-8", "replace"))

    def known_as(self, token: str) -> str:
        """As it was marked; empty where it was not."""
        path = f"{self.path(token)}/{_SUBMITTED}"
        with _using(path):
            return (_content(path) or b"").decode("utf-8", "replace")

    def is_gone(self, token: str) -> bool:
        """Whether somebody has removed it: all the others are there to be seen."""
        return self._folder.is_dir() and not os.path.isdir(self.path(token))

    def is_submitted(self, token: str) -> bool:
        """A parcel that is not there is a fault: it may be that its network is not."""
        with _using(self.path(token)):
            return _SUBMITTED in os.listdir(self.path(token))

    def mark_lost(self, token: str, number: int) -> None:
        """A supervisor that still lives ends its program and leaves, within seconds where the network allows."""
        self._mark(token, f"{number}.lost")

    def void(self, token: str, number: int) -> bool:
        """True where the element had not begun and never will; false where somebody has begun it."""
        path = f"{self.path(token)}/{number}.began"
        with _using(path):
            try:
                _write(path, _VOID)
            except FileExistsError:
                return _content(path) == _VOID
        return True

    def _mark(self, token: str, name: str, content: bytes = b"") -> None:
        path = f"{self.path(token)}/{name}"
        with _using(path), contextlib.suppress(FileExistsError):
            _write(path, content)

    # What supervisors left

    def traces(self, token: str) -> Mapping[int, ElementTrace]:
        """By their numbers, of elements that have left any by now. A file is read once."""
        seen = self._seen.setdefault(token, {})
        for number, kind in self._names(token):
            trace = seen.get(number, ElementTrace())
            if getattr(trace, kind) is None:
                found = _understood(kind, f"{self.path(token)}/{number}.{kind}")
                if found is not None:
                    seen[number] = msgspec.structs.replace(trace, **{kind: found})
        return dict(seen)

    def output(self, token: str, number: int) -> bytes | None:
        """The last of what the site kept of the supervisor's own output."""
        path = f"{self.path(token)}/{number}.out"
        with _using(path):
            return _content(path, _MOST_OUTPUT)

    def _names(self, token: str) -> Iterator[tuple[int, str]]:
        with _using(self.path(token)):
            names = os.listdir(self.path(token))
        for match in filter(None, map(_TRACE.fullmatch, names)):
            yield int(match[1]), match[2]


# What is in the files


def _element(launch: Launch, log: str, base: Mapping[str, str]) -> dict[str, Any]:
    own = launch.environment
    differences: dict[str, str | None] = {name: value for name, value in own.items() if base.get(name) != value}
    differences.update(dict.fromkeys(base.keys() - own.keys()))
    return {
        "key": f"{launch.job_id}.{launch.attempt}",
        "command": launch.command,
        "cwd": launch.cwd,
        "environment": differences,
        "stdin": launch.stdin or "",
        "folder": launch.folder,
        "log": log,
    }


def _as_written(element: Mapping[str, Any]) -> SubmittedElement:
    program, stdin = element["command"][0], element["stdin"] or None
    return SubmittedElement(
        key=element["key"],
        log=element["log"],
        things=StartContext(directory=element["cwd"], program=program, stdin=stdin),
    )


def _understood(kind: str, path: str) -> Began | NeverBegan | Finish | None:
    with _using(path):
        content = _content(path)
    if content is None:
        return None
    if kind == "began" and content == _VOID:
        return VOID
    if kind == "began" and not content:
        return _begun_without_a_word(path)
    try:
        if kind == "began":
            return msgspec.json.decode(content, type=Began)
        return msgspec.json.decode(content, type=Finish)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _begun_without_a_word(path: str) -> Began | None:
    """On a full disk, or as its node died, the file is all there is of it; but it may be written at this moment."""
    with _using(path):
        at = os.stat(path).st_mtime
    return Began(at=at, node="?", pid=0) if time.time() - at > _WRITTEN_WITHIN_S else None


def _content(path: str, most: int | None = None) -> bytes | None:
    """`None` where there is no such file; at most so much of its end."""
    try:
        with open(path, "rb") as file:
            if most is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read()
    except FileNotFoundError:
        return None


def _write(path: str, content: bytes = b"", *, is_synced: bool = False) -> None:
    """A new file. Where it cannot be written whole it is gone again: who saw it in between saw that it was there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            if is_synced:
                os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def _using(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"{error.filename or path} cannot be used for work that is handed over: {error.strerror}",
            hint="see that its folder is there on this machine and yours, and its disk not full",
        ) from error
