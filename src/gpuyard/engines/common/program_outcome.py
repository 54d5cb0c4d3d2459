"""How an attempt ended and why: from the last word of its keeper or supervisor, the end of its logs, and the
kernel's count of processes killed for lack of memory. Nothing that reads evidence raises: what cannot be read is
an empty text or None.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, takewhile
from operator import truediv
from pathlib import Path
from typing import Self

from msgspec import Struct

from gpuyard.engines.common.job_logs import open_log
from gpuyard.engines.common.spawn_program import (
    BEGAN,
    BY_SIGNAL,
    START_FAILURES,
    StartFailure,
    describe,
    headline,
    is_unbegun,
)
from gpuyard.errors import UserError
from gpuyard.model.container import CONTAINER_TOOLS
from gpuyard.model.error_line import explain_failure, find_device_fault
from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.out_of_memory import KILLED, Shortage, killed_by_kernel, recognise
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.ports import Launch

# The exit status of docker and podman when they could not run the container. Their other failures are above.
TOOL_FAILED = 125


def check_arguments(launch: Launch, environment: dict[str, str]) -> None:
    """Raise UserError for zero bytes, lone UTF-16 surrogates and variables without a proper name."""
    texts = (*launch.command, launch.cwd, launch.stdin or "", *_outputs(launch), *environment, *environment.values())
    try:
        is_passable = b"\0" not in os.fsencode("".join(texts)) and "" not in environment
    except UnicodeEncodeError:
        is_passable = False
    if not is_passable or "=" in "".join(environment):
        raise UserError(
            f"the command of job {launch.job_id} cannot be passed to a program: an argument or variable has a zero byte"
            " or an incomplete character, or the name of a variable is invalid",
            hint="check its arguments, and the environment it was submitted with",
        )


class StartContext(Struct, frozen=True, kw_only=True):
    directory: str | None = None
    program: str | None = None
    stdin: str | None = None
    output: str | None = None

    @classmethod
    def of(cls, launch: Launch) -> Self:
        output = " or ".join(_outputs(launch))
        return cls(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin, output=output)


def _outputs(launch: Launch) -> list[str]:
    return [path for path in (launch.output, launch.error) if path is not None]


def outcome_of(word: str | None, context: StartContext) -> Outcome:
    """Return the outcome of an attempt that is over, by the last word on it; None if there is none."""
    if word is None or is_unbegun(word):
        limit = limit_of(word)
        reason = "the daemon or its keeper was gone before it could start" if limit is None else limit.text
        return Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason)
    if word == BEGAN:
        reason = "its keeper is gone without a status: it was killed, or the machine went down"
        return Outcome(kind=OutcomeKind.LOST, reason=reason)
    if not word.isdigit():
        if word not in START_FAILURES:
            return Outcome(kind=OutcomeKind.LOST, reason=f"its keeper wrote an unknown word: {word}")
        subject = {
            "no-directory": context.directory or "of the job",
            "no-program": context.program or "of that name",
            "not-executable": context.program or "the program",
            "no-output": context.output or "of the job",
            "unsafe-output": context.output or "of the job",
        }.get(word, context.stdin or "of the job")
        reason = START_FAILURES[word].format(subject)
        return Outcome(kind=OutcomeKind.CANNOT_START, status=StartFailure(word).status, reason=reason)
    if word == "0":
        return Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    try:
        reason = f"signal {int(word) - BY_SIGNAL} ({signal.Signals(int(word) - BY_SIGNAL).name})"
    except ValueError:
        reason = f"exit status {word}"
        if int(word) == TOOL_FAILED and context.program in CONTAINER_TOOLS:
            reason = f"{context.program} could not run the container ({reason}); see the job's log"
    return Outcome(kind=OutcomeKind.FAILED, status=int(word), reason=reason)


def limit_of(word: str | None) -> ResourceLimit | None:
    """Return the limit that kept an attempt from starting, by the last word on it; None if there was none."""
    text, remedy, is_own = describe(word or "")
    return ResourceLimit(text=text, remedy=remedy, is_own=is_own) if text else None


_ROOT = Path("/")
_MOST_BYTES = 1 << 16
_MOST_S, _LEAVE_ALONE_S = 5.0, 60.0
_hung: dict[Path, float] = {}  # folders that are not read, and until when


class FailureEvidence(Struct, frozen=True, kw_only=True):
    """The outcome with the line that says why, the memory that ran out, and a fault of the GPU; None: not the cause."""

    outcome: Outcome
    shortage: Shortage | None = None
    device_fault: str | None = None


def read_outputs(outcome: Outcome, logs: Sequence[str | None], key: str, *, is_local: bool = False) -> list[str]:
    """Return the ends of the logs of a failed attempt, that of standard error first; nothing for any other. `key` is
    that of the attempt: what a file of the user held before it does not count. `is_local`: no disk of them can hang."""
    if outcome.kind is not OutcomeKind.FAILED:
        return []
    read = partial(_read_tail, most_bytes=_MOST_BYTES) if is_local else read_tail
    parts = [read(Path(log)).rpartition(headline(*key.split("."))) for log in reversed(logs) if log is not None]
    return [after.partition("\n")[2] if begins else after for _, begins, after in parts]


def evidence_of(outcome: Outcome, texts: Sequence[str], kills_before: int | None) -> FailureEvidence:
    if not texts:
        return FailureEvidence(outcome=outcome)
    outcome = explain_failure(outcome, texts)
    shortage = next(filter(None, map(recognise, texts)), None)
    if shortage is None and kills_before is not None and outcome.status == KILLED:
        shortage = killed_by_kernel(outcome.status, kills_before, oom_kills(), None, None)
    fault = next(filter(None, map(find_device_fault, texts)), None) if shortage is None else None
    return FailureEvidence(outcome=outcome, shortage=shortage, device_fault=fault)


def read_tail(log: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the last bytes of a log, from the place where it was cut at most. A file that the user named may be on a
    network disk that hangs: it is waited for for 5 s, and then nothing in its folder is read for a minute."""
    if time.monotonic() < _hung.get(log.parent, 0.0):
        return ""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(_read_tail(log, most_bytes)), daemon=True)
    try:
        reader.start()
    except RuntimeError:  # no more threads
        return _read_tail(log, most_bytes)
    reader.join(_MOST_S)
    if not found:
        _hung[log.parent] = time.monotonic() + _LEAVE_ALONE_S
    return "".join(found)


def _read_tail(log: Path, most_bytes: int) -> str:
    try:
        with open_log(log) as opened:
            end = opened.end
            return b"".join(opened.read_all(max(opened.first, end - most_bytes), end)).decode(errors="replace")
    except OSError:
        return ""


def oom_kills(pid: int | None = None, root: Path = _ROOT) -> int | None:
    """Return how many processes of this process's cgroup (default: ours) the kernel has killed for lack of memory. It
    counts every such kill, whether the group or the whole machine was full. Compare only counts of the same process:
    another daemon may be in another group."""
    for path in _event_files(root, "self" if pid is None else str(pid)):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
    return None


class OomKillCount:
    """Our count of killed processes, read at most once per second: a thousand jobs may start in that time."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._kills: int | None = None

    def now(self) -> int | None:
        now = time.monotonic()
        if now >= self._read_at + 1.0:
            self._read_at, self._kills = now, oom_kills()
        return self._kills


def loaded_libraries(pid: int, root: Path = _ROOT) -> str:
    """Return the shared libraries that a process has loaded, one path per line: they show which framework it uses."""
    lines = _read(root / "proc" / str(pid) / "maps").splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line and ".so" in line}
    return "\n".join(sorted(paths))


def _event_files(root: Path, process: str) -> Iterator[Path]:
    """Yield files to try, the nearest group first. A cgroup of version 2 counts for its descendants too."""
    top = root / "sys/fs/cgroup"  # in a container the group itself
    groups: dict[str, str] = {}  # by controller; version 2 has the empty name
    for line in _read(root / "proc" / process / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    if "" in groups:
        for mount in (top, top / "unified"):
            yield from (folder / "memory.events" for folder in reversed(_lineage(mount, groups[""])))
    if "memory" in groups:  # version 1: only the group itself and the mount are useful
        lineage = _lineage(top / "memory", groups["memory"])
        yield from (folder / "memory.oom_control" for folder in (lineage[-1], lineage[0]))


def _lineage(mount: Path, path: str) -> list[Path]:
    parts = takewhile(lambda part: part != "..", filter(None, path.split("/")))
    return list(accumulate(parts, truediv, initial=mount))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
