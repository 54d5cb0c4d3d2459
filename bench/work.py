"""The work that every tool gets: one command `count` times, `slots` at a time, within a time limit."""

import contextlib
import ctypes
import itertools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

_PR_SET_CHILD_SUBREAPER = 36
_TIME_LIMIT_S = 60.0
_END_S = 3.0


class ToolFailed(Exception):
    """A tool did not complete the work; the message has its last output."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path  # empty at first; only for this work, and removed after that of all tools
    command: tuple[str, ...]
    count: int
    slots: int
    deadline: float

    def seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise ToolFailed(f"not done within {_TIME_LIMIT_S:.0f} s")
        return left

    def call(self, command: Sequence[str], env: Mapping[str, str] | None = None, typed: str = "") -> str:
        """Run one of the tool's commands with `typed` as its input, and return its output. Raises ToolFailed."""
        # A file, not a pipe: a server that the command leaves running would keep the pipe open.
        with (self.folder / "printed").open("w+") as printed, (self.folder / "typed").open("w+") as typing:
            typing.write(typed)
            typing.seek(0)
            limit = self.seconds_left()
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **(env or {})},
                    cwd=self.folder,
                    stdin=typing,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise ToolFailed(f"not done within {_TIME_LIMIT_S:.0f} s") from None
            printed.seek(0)
            text = printed.read()
        if done.returncode != 0:
            last = (text.strip().splitlines() or ["(no output)"])[-1]
            raise ToolFailed(f"'{Path(command[0]).name} {' '.join(command[1:3])}' ended with {done.returncode}: {last}")
        return text

    def wait_until(self, is_done: Callable[[], bool], every_s: float) -> None:
        """Poll until `is_done`, for tools without a command that waits."""
        while not is_done():
            self.seconds_left()
            time.sleep(every_s)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: Callable[[Work], float]  # does the work; returns the seconds from submission to the last job's end
    install: str = ""
    is_installed: Callable[[], bool] = lambda: True
    is_own: bool = False  # gpuyard or a floor: it cleans up after itself, and may wait for child processes
    jobs: int = 1000
    hand_overs: int = 200
    note: str = ""


def do_work(tool: Tool, folder: Path, command: Sequence[str], count: int, slots: int) -> float:
    folder.mkdir()
    work = Work(
        folder=folder,
        command=tuple(command),
        count=count,
        slots=slots,
        deadline=time.monotonic() + _TIME_LIMIT_S,
    )
    with contextlib.nullcontext() if tool.is_own else _nothing_left_behind():
        return tool.run(work)


@contextlib.contextmanager
def serving(command: Sequence[str], work: Work, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a server in the foreground of a child process, until the block ends."""
    with (work.folder / f"{Path(command[0]).name}.server-log").open("wb") as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            cwd=work.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_END_S)
            server.kill()
            server.wait()


@contextlib.contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Adopt all daemons and detached jobs that a tool starts, and end them after the block."""
    _adopt_orphans(1)
    try:
        yield
    finally:
        while children := psutil.Process().children(recursive=True):
            _, alive = psutil.wait_procs(children, _signal(children, psutil.Process.terminate))
            psutil.wait_procs(alive, _signal(alive, psutil.Process.kill))
        _adopt_orphans(0)


def _signal(processes: Sequence[psutil.Process], send: Callable[[psutil.Process], None]) -> float:
    """Signal all processes. Return how long to wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
    return _END_S


def _adopt_orphans(yes: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, yes, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this system does not let a process adopt orphans; the peers need Linux")


def compile_stamp(folder: Path) -> tuple[str, ...]:
    """Return a command that appends `START END` in nanoseconds to the file that is its last argument."""
    program, source = folder / "stamp", Path(__file__).with_name("stamp.c")
    for linking in ("-static", "-O2"):  # a static program starts faster, but needs libraries that may be missing
        if shutil.which("cc") and _compiles(["cc", "-O2", linking, "-o", str(program), str(source)]):
            return (str(program),)
    return ("sh", "-c", 's=$(date +%s%N); echo $s $(date +%s%N) >>"$1"', "sh")


def _compiles(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def gaps_s(stamps: Path, count: int) -> list[float]:
    """Return the seconds from each job's end to the next job's start."""
    lines = stamps.read_text().splitlines() if stamps.exists() else []
    if len(lines) != count:
        raise ToolFailed(f"{len(lines)} of {count} jobs ran")
    times = sorted(tuple(map(int, line.split())) for line in lines)
    return [(after[0] - before[1]) / 1e9 for before, after in itertools.pairwise(times)]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
