"""Run vendors' command-line tools with a timeout that always holds, and the calls that make up a reading.

A tool gets its own session, no input, the C locale, and a timeout, after which it is killed with its children. A tool
that hangs in a driver call cannot be killed: it is left behind, and not started again while it exists. A failed call
backs off for one second, doubled with each failure, at most a minute."""

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from msgspec import Struct

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeGarbled, ProbeMissing, ProbeTimeout
from gpuyard.model.machine_snapshot import Problem, Reading, Vendor

MAX_OUTPUT_BYTES = 32 * 1024 * 1024
_DENIED = re.compile(
    r"permission denied|operation not permitted|superuser|must be (?:run|invoked|executed) as|requires? root"
    r"|insufficient permissions?|access denied|are you root",
    re.IGNORECASE,
)
_stuck: dict[str, subprocess.Popen[bytes]] = {}


class ToolOutput(Struct, frozen=True, kw_only=True):
    """`status` is None if we ended the tool."""

    name: str
    stdout: str
    stderr: str
    status: int | None

    def require_success(self) -> str:
        """Return the standard output, or raise if the tool failed."""
        if self.status not in (0, None):
            raise self.failure()
        return self.stdout

    def read(self, parse: Callable[[str], Reading]) -> Reading:
        """Parse the output even if the tool failed: AMD's tools fail if a single figure is not supported."""
        try:
            return parse(self.stdout)
        except ProbeGarbled:
            if self.status not in (0, None):
                raise self.failure() from None
            raise

    def failure(self) -> ProbeCrashed | ProbeDenied:
        said = f"{self.stderr}\n{self.stdout}"
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it printed nothing")
        if _DENIED.search(said):
            return ProbeDenied(self.name, f"permission denied: {last[:200]}", hint="run it as root")
        end = f"signal {-self.status}" if self.status and self.status < 0 else f"status {self.status}"
        hint = f"run `{self.name}` yourself to see why"
        return ProbeCrashed(self.name, f"it ended with {end}: {last[:200]}", hint=hint)


def find_tool(name: str) -> str:
    """Return the path of the tool; raise ProbeMissing or ProbeDenied."""
    path = shutil.which(name)
    if path is not None:
        return path
    candidates = (os.path.join(folder, name) for folder in os.get_exec_path())
    if (denied := next(filter(os.path.isfile, candidates), None)) is not None:
        raise ProbeDenied(name, f"{denied} is not executable", hint=f"chmod +x {denied}")
    raise ProbeMissing(name, "not installed, or not on PATH")


def find_any_tool(names: Sequence[str]) -> None:
    """Raise ProbeMissing if none of the tools is installed. A tool that is not executable counts as installed."""
    for name in names:
        with contextlib.suppress(ProbeMissing):
            with contextlib.suppress(ProbeDenied):
                find_tool(name)
            return
    raise ProbeMissing(", ".join(names), "not installed, or not on PATH")


def run_tool(argv: Sequence[str], timeout_s: float, *, enough: Callable[[bytes], object] | None = None) -> ToolOutput:
    """Run `argv` until it exits, `enough(output so far)` returns True, or the timeout passes (ProbeTimeout)."""
    name = argv[0]
    path = find_tool(name)
    stuck = _stuck.pop(name, None)
    if stuck is not None and stuck.poll() is None:
        _stuck[name] = stuck
        message = f"process {stuck.pid} of an earlier call hangs and cannot be killed"
        raise ProbeTimeout(name, message, hint="the driver is stuck: see dmesg; a reboot may be needed")
    deadline, pipe = time.monotonic() + timeout_s, subprocess.PIPE
    try:
        process = subprocess.Popen(
            [path, *argv[1:]], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except PermissionError as error:
        raise ProbeDenied(name, f"{path} cannot be executed: {error.strerror}") from error
    except OSError as error:
        why = "its interpreter is missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise ProbeCrashed(name, f"{path} cannot start: {why}") from error
    try:
        stdout, stderr, finished = _collect(process, deadline, enough)
    finally:
        _end(name, process)
    if not finished:
        hint = f"run `{' '.join(argv)}` yourself to see why"
        raise ProbeTimeout(name, f"no answer within {timeout_s:.1f} s", hint=hint)
    texts = [each.decode("utf-8", "replace") for each in (stdout, stderr)]
    status = None if enough is not None and enough(stdout) else process.returncode
    return ToolOutput(name=name, stdout=texts[0], stderr=texts[1], status=status)


def _collect(
    process: subprocess.Popen[bytes], deadline: float, enough: Callable[[bytes], object] | None
) -> tuple[bytes, bytes, bool]:
    """Return standard output, standard error, and whether the tool finished or printed enough."""
    assert process.stdout is not None
    assert process.stderr is not None
    chunks: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    printed, finished = chunks[process.stdout], False
    with selectors.DefaultSelector() as selector:
        for pipe in chunks:
            selector.register(pipe, selectors.EVENT_READ, pipe)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            if not finished and process.poll() is not None:
                # A grandchild may hold the pipe open after the tool itself has ended.
                finished, deadline = True, min(deadline, time.monotonic() + 0.1)
            for key, _ in selector.select(min(left, 0.02) if finished else min(left, 0.1)):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                chunks[key.data] += data
            if len(printed) > MAX_OUTPUT_BYTES or (enough and enough(bytes(printed))):
                finished = True
                break
        else:
            finished = finished or _has_ended(process, deadline - time.monotonic())
    return bytes(printed), bytes(chunks[process.stderr]), finished


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, within_s))
    return process.returncode is not None


def _end(name: str, process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of the tool, and remember a tool that survives SIGKILL."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        _kill_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if not _has_ended(process, 0.2):
        _stuck[name] = process


def _kill_descendants(pid: int) -> None:
    """Kill descendants that left the tool's session, which killpg does not reach."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._at - time.monotonic())

    def is_over(self) -> bool:
        return self.left() == 0.0


def run_until(argv: Sequence[str], deadline: Deadline, *, enough: Callable[[bytes], bool] | None = None) -> ToolOutput:
    """Run the tool within the remaining time. Raise ProbeTimeout without starting it if none remains."""
    if deadline.is_over():
        raise ProbeTimeout(argv[0], f"no time was left for `{' '.join(argv)}`")
    return run_tool(argv, deadline.left(), enough=enough)


class Backoff:
    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def is_resting(self, now: float) -> bool:
        return self._failures > 0 and now < self._until

    def fail(self, kind: str, now: float) -> None:
        """Record a failure of this kind of ProbeError. A missing tool is not looked for again within a minute."""
        self._until = now + (60.0 if kind == "missing" else min(60.0, 2.0 ** min(self._failures, 6)))
        self._failures += 1

    def succeed(self) -> None:
        self._failures = 0


def as_problem(error: ProbeError, vendor: Vendor, message: str | None = None) -> Problem:
    message = error.message if message is None else message
    return Problem(source=error.source, kind=error.kind, message=message, hint=error.hint, vendor=vendor)


def problem_beside(error: ProbeError, vendor: Vendor, about: str | None = None) -> Problem:
    """Return the problem of one failed call in a reading that otherwise succeeded; `about` names the failed part. The
    remaining time differs between readings, so the message leaves it out: otherwise it would look new each time."""
    said = f"{about}: {error.message}" if about else error.message
    return as_problem(error, vendor, re.sub(r" within \d+(?:\.\d+)? s\b", " in time", said))


class OptionalCall:
    """A call that a reading can do without. After a timeout it is left out for a while, as after a failure of a probe:
    one that hangs would slow every reading."""

    def __init__(self, vendor: Vendor, about: str) -> None:
        self._vendor, self._about = vendor, about
        self._backoff, self._late = Backoff(), Reading()

    def read(self, call: Callable[[], Reading], deadline: Deadline) -> Reading:
        """Return its reading, or one that has only the problem with it."""
        if self._backoff.is_resting(time.monotonic()):
            return self._late
        has_time = not deadline.is_over()  # else another call was late
        try:
            reading = call()
        except ProbeError as error:
            reading = Reading(problems=(problem_beside(error, self._vendor, self._about),))
            if has_time and isinstance(error, ProbeTimeout):
                self._backoff.fail(error.kind, time.monotonic())
                self._late = reading
                return reading
        self._backoff.succeed()
        return reading
