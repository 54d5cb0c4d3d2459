"""An engine for one test, daemons that can be killed, and helpers to watch them."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.model.job import Attempt, Outcome, Started
from gpuyard.ports import Launch, Prepared

DEADLINE_S = 90.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.fixture
def engine(folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(folder)
    yield engine
    engine.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe at which a program waits until the test calls `let_go`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def let_go(pipe: Path) -> None:
    pipe.write_text("go\n")


def launch_of(job_id: int, *command: str, **other: object) -> Launch:
    environment = {"PATH": os.environ["PATH"], "GPUYARD_JOB_ID": str(job_id), "GPUYARD_ATTEMPT": "1"}
    fields = {"cwd": "/", "environment": environment, "attempt": 1, **other}
    fields["environment"] = {**environment, **fields["environment"]}  # type: ignore[dict-item]
    return Launch(job_id=job_id, command=command, **fields)  # type: ignore[arg-type]


def attempt_of(prepared: Prepared) -> Attempt:
    return Attempt(
        job_id=prepared.job_id,
        number=prepared.attempt,
        phase=Started(at=0.0, keeper_pid=prepared.keeper_pid),
        boot_id=None,
        log=prepared.log,
    )


def started(engine: LocalEngine, job_id: int, *command: str, lease: int | None = None) -> Attempt:
    prepared = engine.prepare(launch_of(job_id, *command), lease)
    engine.start_prepared()
    return attempt_of(prepared)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], 0.02)


def outcomes(engine: LocalEngine, count: int = 1) -> dict[int, Outcome]:
    """Wait for the next `count` ends, and return their outcomes by job."""
    ended: dict[int, Outcome] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < count:
        assert time.monotonic() < deadline, f"{len(ended)} of {count} ended"
        ended.update((one.job_id, one.outcome) for one in engine.ended())
        if len(ended) < count:
            select.select([engine.fileno()], [], [], 0.5)
    return ended


def outcome_of(engine: LocalEngine, launch: Launch, lease: int | None = None) -> Outcome:
    engine.prepare(launch, lease)
    engine.start_prepared()
    return outcomes(engine)[launch.job_id]


def log_of(folder: Path, job_id: int) -> str:
    return (folder / "logs" / f"{job_id}.1.log").read_text(encoding="utf-8", errors="surrogateescape")


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pid: int, what: str) -> None:
    wait_for(lambda: is_gone(pid), f"the end of {what}")


# Reads the launches from standard input, as they may be long, and prints what it prepared.
_DAEMON = """
import sys
from pathlib import Path
import msgspec
from gpuyard.model.job import Attempt
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.ports import Launch
engine = LocalEngine(Path(sys.argv[1]))
engine.adopt(msgspec.json.decode(sys.argv[2], type=list[Attempt]))
prepared = [engine.prepare(launch, None) for launch in msgspec.json.decode(sys.stdin.readline(), type=list[Launch])]
if sys.argv[3] == "begin":
    engine.start_prepared()
print(msgspec.json.encode(prepared).decode(), flush=True)
sys.stdin.read()
"""


class Daemon:
    def __init__(self, process: "subprocess.Popen[bytes]", attempts: list[Attempt]) -> None:
        self._process = process
        self.attempts = attempts

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def daemon(folder: Path, action: str, *launches: Launch, adopted: list[Attempt] | None = None) -> Iterator[Daemon]:
    """Run an engine in another process: it adopts, prepares and, if `action` is `begin`, starts. Kill it at the end."""
    command = [sys.executable, "-c", _DAEMON, str(folder), msgspec.json.encode(adopted or []).decode(), action]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(launches) + b"\n")
        process.stdin.flush()
        prepared = msgspec.json.decode(process.stdout.readline(), type=list[Prepared])
        yield Daemon(process, [attempt_of(one) for one in prepared])
        process.kill()
