"""Submissions on disk, from the engine's side.

A submission is a folder named by its token, in a folder that the engine and all nodes see. It holds `submission.json`
with its terms and elements, which is always complete; `submitted`; and for each element, by its number, the files that
`node_supervisor.py` writes and reads. Only the owner can read them: environments may hold secrets.

- Either the supervisor or the engine creates `N.started`; the engine thereby *voids* the element: it never will run.
- A file that cannot be read completely counts as not written yet.
- A submission is renamed before it is removed, so that no late supervisor finds half of it.

Every call may raise EnvironmentFault. For one thread at a time."""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.engines.cluster.node_supervisor import CHECK_LOST_EVERY_S, digest_of
from gpuyard.engines.common import output_relay
from gpuyard.engines.common.job_logs import Outputs, outputs_of
from gpuyard.engines.common.program_outcome import StartContext
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.job import Usage
from gpuyard.ports import Launch
from gpuyard.system.folder_tree import remove_tree
from gpuyard.system.private_files import check_folder, make_folder
from gpuyard.system.user_directories import LOCAL, file_system

_TRACE = re.compile(r"([0-9]+)\.(started|ended)")
_CONTENT, _SUBMITTED, _VOID = "submission.json", "submitted", b"void"
_OTHER_FOLDER = "name another as `folder` of the engine in config.toml"
_WRITTEN_WITHIN_S = 30.0


class SubmittedElement(Struct, frozen=True, kw_only=True):
    key: str
    outputs: Outputs
    context: StartContext


class ElementStart(Struct, frozen=True, kw_only=True):
    """`pid` is the supervisor's; `gpus` are those that the site gave, such as `0,1`."""

    at: float
    node: str
    pid: int
    gpus: str = ""


# Stands for an element that the engine has voided: it has not started, and never will.
VOID = ElementStart(at=0.0, node="", pid=0)


class Finish(Struct, frozen=True, kw_only=True):
    """How an element ended."""

    word: str  # for `outcome_of`
    at: float
    pid: int | None = None  # the program's, if it was started
    usage: Usage | None = None
    warned_at: float | None = None  # when it got the signal of `--signal`


class ElementTrace(Struct, frozen=True, kw_only=True):
    started: ElementStart | None = None
    ended: Finish | None = None


_FORMS: dict[str, type[ElementStart | Finish]] = {"started": ElementStart, "ended": Finish}


class SubmissionDirs:
    """All submissions of one engine, in `folder/submissions`, which is created with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute() / "submissions"
        self._seen: dict[str, dict[int, ElementTrace]] = {}
        self._empty_since: dict[str, float] = {}  # by the monotonic clock

    def make(self, *others: Path) -> None:
        for folder in (self._folder, *others):
            with _using(str(folder)):
                make_folder(str(folder), _OTHER_FOLDER)

    def check(self, *others: Path) -> bool:
        """Return whether all these folders exist. Raises PrivateFileError if other users can write there."""
        found = [check_folder(str(folder), _OTHER_FOLDER) for folder in (self._folder, *others)]
        return None not in found

    def path(self, token: str) -> str:
        return f"{self._folder}/{token}"

    def write(self, token: str, elements: Sequence[tuple[Launch, str]]) -> None:
        """Write launches on the same terms, with the paths of their logs. All of it is on disk when this returns."""
        draft = self.path(f".{token}")  # of a folder that is being written or removed; no token starts so
        first = elements[0][0]
        content = {
            "terms": msgspec.json.encode(first.terms).decode(),
            "environment": first.environment,
            "elements": [_element(launch, log, first.environment) for launch, log in elements],
        }
        with _using(self.path(token)):
            self.make()
            os.mkdir(draft, 0o700)
            try:
                _write(f"{draft}/{_CONTENT}", json.dumps(content).encode("ascii"), is_synced=True)
                os.rename(draft, self.path(token))
            except OSError:
                remove_tree(draft)
                raise

    def read(self, token: str) -> tuple[ClusterTerms, list[SubmittedElement]]:
        path = f"{self.path(token)}/{_CONTENT}"
        with _using(path), open(path, "rb") as file:
            text = file.read()
        try:
            content = json.loads(text)
            elements = []
            for each in content["elements"]:
                outputs = tuple((path, cap) for path, cap in each["outputs"])
                named = " or ".join(path for path, cap in outputs if not cap)
                program, stdin = each["command"][0], each["stdin"] or None
                context = StartContext(directory=each["cwd"], program=program, stdin=stdin, output=named)
                elements.append(SubmittedElement(key=each["key"], outputs=outputs, context=context))
            return msgspec.json.decode(content["terms"], type=ClusterTerms), elements
        except (ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
            hint = "its jobs may run or not: see the cluster"
            raise EnvironmentFault(f"{path} cannot be understood: {error}", hint=hint) from error

    def digest(self, token: str) -> str:
        path = f"{self.path(token)}/{_CONTENT}"
        with _using(path), open(path, "rb") as file:
            return digest_of(file.read())

    def all(self) -> list[str]:
        """Return all tokens, and remove what a dead daemon left half done. Call it only before the first `write`."""
        with _using(str(self._folder)):
            names = sorted(os.listdir(self._folder)) if self._folder.exists() else []
        for name in names:
            if name.startswith("."):
                remove_tree(self._folder / name)
        return [name for name in names if not name.startswith(".")]

    def written_at(self, token: str) -> int:
        """Return when it was written, by the clock of the disk in nanoseconds; 0 if that is not known."""
        with contextlib.suppress(OSError):
            return os.stat(f"{self.path(token)}/{_CONTENT}").st_mtime_ns
        return 0

    def forget(self, token: str) -> None:
        self._seen.pop(token, None)
        hidden = self.path(f".{token}")
        with _using(self.path(token)), contextlib.suppress(FileNotFoundError):
            os.rename(self.path(token), hidden)
        # On a network file system, a file that a process has open cannot be removed: the next daemon does it.
        with contextlib.suppress(FileNotFoundError):
            remove_tree(hidden)

    def mark_submitted(self, token: str, known_as: str = "") -> None:
        self._mark(token, _SUBMITTED, known_as.encode("utf-8", "replace"))

    def known_as(self, token: str) -> str:
        path = f"{self.path(token)}/{_SUBMITTED}"
        with _using(path):
            return (_content(path) or b"").decode("utf-8", "replace")

    def is_gone(self, token: str) -> bool:
        """Return whether the folder was removed, and not just its whole file system is missing."""
        return self._folder.is_dir() and not os.path.isdir(self.path(token))

    def is_complete(self, token: str) -> bool:
        return os.path.lexists(f"{self.path(token)}/{_CONTENT}")

    def mark_lost(self, token: str, number: int) -> None:
        """Tell a supervisor that still runs to kill its program and exit. It does so within `stops_within_s`."""
        self._mark(token, f"{number}.lost")

    def stops_within_s(self) -> float:
        """Return how long a supervisor takes after `mark_lost`, if the network allows."""
        is_local = file_system(str(self._folder)) in LOCAL
        # The default `acdirmax` of NFS: for how long a client may believe that a folder has not changed.
        return CHECK_LOST_EVERY_S + 3.0 + (0.0 if is_local else 60.0)

    def void(self, token: str, number: int) -> bool:
        """Keep the element from starting. Return False if it has started."""
        path = f"{self.path(token)}/{number}.started"
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

    def traces(self, token: str) -> Mapping[int, ElementTrace]:
        """Return traces by number, of elements that have any. Reads a file once."""
        seen = self._seen.setdefault(token, {})
        with _using(self.path(token)):
            names = os.listdir(self.path(token))
        for match in filter(None, map(_TRACE.fullmatch, names)):
            number, kind = int(match[1]), match[2]
            trace = seen.get(number, ElementTrace())
            if getattr(trace, kind) is None:
                found = self._parse(kind, f"{self.path(token)}/{number}.{kind}")
                if found is not None:
                    seen[number] = msgspec.structs.replace(trace, **{kind: found})
        return dict(seen)

    def _parse(self, kind: str, path: str) -> ElementStart | Finish | None:
        """Return None if the file cannot be read completely yet."""
        with _using(path):
            content = _content(path)
            if content == _VOID and kind == "started":
                return VOID
            if content == b"" and kind == "started":
                # A full disk or the death of the node may leave the file empty; but it may also be being written. The
                # file server's clock may differ from ours: what counts is for how long we have seen it empty.
                seen_at = self._empty_since.setdefault(path, time.monotonic())
                is_written = time.monotonic() - seen_at >= _WRITTEN_WITHIN_S
                return ElementStart(at=os.stat(path).st_mtime, node="?", pid=0) if is_written else None
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                return None if content is None else msgspec.json.decode(content, type=_FORMS[kind])
        return None

    def usage(self, token: str, number: int) -> Usage | None:
        path = f"{self.path(token)}/{number}.usage"
        with _using(path), contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            content = _content(path)
            return None if content is None else msgspec.json.decode(content, type=Usage)
        return None

    def output(self, token: str, number: int) -> bytes | None:
        """Return the end of the supervisor's own output, if the site wrote it to this folder."""
        path = f"{self.path(token)}/{number}.out"
        with _using(path):
            return _content(path, 1 << 16)


def _element(launch: Launch, log: str, base: Mapping[str, str]) -> dict[str, Any]:
    own, outputs = launch.environment, outputs_of(log, launch)
    differences = {name: own.get(name) for name in {**base, **own} if base.get(name) != own.get(name)}
    terms = launch.terms
    warning, limit_s = (None, None) if terms is None else (terms.warning, terms.limit_s)
    return {
        "key": launch.key,
        "command": launch.command,
        "cwd": launch.cwd,
        "environment": differences,
        "stdin": launch.stdin or "",
        "folder": launch.folder,
        "outputs": outputs,
        "relay": output_relay.command(outputs) if launch.timestamps else (),
        "umask": None if launch.shell is None else launch.shell.umask,
        "warning": None if warning is None else warning.signum,
        "warn_after_s": None if warning is None or limit_s is None else limit_s - warning.lead_s,
    }


def _content(path: str, most: int | None = None) -> bytes | None:
    """Return the file's content, or at most its last `most` bytes; None if there is no file."""
    try:
        with open(path, "rb") as file:
            if most is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read()
    except FileNotFoundError:
        return None


def _write(path: str, content: bytes = b"", *, is_synced: bool = False) -> None:
    """Create a file. Removes it again if it cannot be written; until then others see that it exists."""
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
            f"{error.filename or path} cannot be used for cluster jobs: {error.strerror}",
            hint="see that its folder exists on this machine and is yours, and that its disk is not full",
        ) from error
