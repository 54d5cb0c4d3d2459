"""A queue of its own for a test: the real daemon, simulated GPUs, real jobs, and what must hold when all is over."""

import contextlib
import os
import secrets
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuyard.connect.daemon_lock import running_pid
from gpuyard.connect.fast_http import DaemonConnection
from gpuyard.core.job.lifecycle import FINISHED
from gpuyard.leases.ledger import open_ledger
from tests.fakes.queue_command import run

DEADLINE_S = 90.0
DAEMON = (sys.executable, "-m", "gpuyard.daemon")
_RUNS = "the daemon is running"


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], 0.02)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def end_what_is_left(home: Path) -> None:
    """Whatever a test leaves behind in its queue ends with it, even where the commands under test are broken."""
    lock = home / "daemon.lock"
    pid = running_pid(lock)
    if pid is not None:
        run("cancel", "all")
        run("wait", "--timeout", "30s")
        os.kill(pid, signal.SIGTERM)
        until(lambda: running_pid(lock) != pid, f"the end of the daemon {pid}")


class Daemon:
    """One life of the daemon, as a child; what it logs is heard as it comes."""

    def __init__(self, command: Sequence[str] = DAEMON) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.pid = self._process.pid
        self._has_spoken = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if _RUNS in line:
                self._has_spoken.set()
        self._has_spoken.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def serves(self) -> bool:
        """Whether it came as far as to serve; where it did not, it has said why."""
        assert self._has_spoken.wait(DEADLINE_S), "the daemon neither runs nor ends"
        return _RUNS in self.log

    def kill(self, signum: int = signal.SIGKILL) -> int:
        self._process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        self.status = self._process.wait(DEADLINE_S)
        self._listener.join(DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return self.status


class QueueUnderTest:
    """The queue in GPUYARD_HOME, spoken to through its socket."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = DaemonConnection(str(home / "daemon.sock"), may_start=False)
        self.daemon: Daemon | None = None
        self._scratch = home.parent

    # The daemon

    def start(self, command: Sequence[str] = DAEMON) -> None:
        self.daemon = Daemon(command)
        assert self.daemon.serves(), self.daemon.log

    def kill9(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        assert self._end(signal.SIGTERM) == 0

    def restart(self, signum: int = signal.SIGKILL) -> None:
        self._end(signum)
        self.start()

    def await_end(self) -> Daemon:
        """Of a daemon that ends by itself."""
        daemon = self.daemon
        assert daemon is not None
        daemon.wait()
        self.daemon = None
        self.client.close()
        return daemon

    def _end(self, signum: int) -> int:
        assert self.daemon is not None
        self.client.close()
        status = self.daemon.kill(signum)
        self.daemon = None
        return status

    # Requests

    def get(self, path: str, **query: str) -> Any:
        return self.client.request("GET", path, query, timeout_s=DEADLINE_S)

    def post(self, path: str, **body: object) -> Any:
        return self.client.request("POST", path, body=body, timeout_s=DEADLINE_S)

    def send(self, *command: str, token: str | None = None, **options: Any) -> Any:
        """The answer to a submission; of the options, `cwd`, `list` and `table` are not typed as such."""
        return self.client.request(
            "POST", "/submissions", body=submission(*command, token=token, **options), timeout_s=DEADLINE_S
        )

    def submit(self, *command: str, **options: Any) -> int:
        """The id of the job, or of the first."""
        return int(self.send(*command, **options)["first"])

    def shell(self, script: str, **options: Any) -> int:
        return self.submit("/bin/sh", "-c", script, **options)

    def job(self, job_id: int) -> Any:
        return self.get(f"/jobs/{job_id}")

    def state(self, job_id: int) -> str:
        return str(self.job(job_id)["state"])

    def why(self, job_id: int) -> str:
        told = self.get(f"/jobs/{job_id}/why")
        return "\n".join([told["summary"], *(f"{reason['text']}\n{reason['remedy']}" for reason in told["reasons"])])

    def counts(self) -> dict[str, int]:
        """Of the states that any job is in."""
        return {state: count for state, count in self.get("/status")["counts"].items() if count}

    def wait(self, ids: str | int = "all") -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (answer := self.get("/wait", ids=str(ids), timeout="5"))["done"]:
            assert time.monotonic() < deadline, f"{ids or 'all'} do not end: {self.counts()}"
        return answer

    def until_state(self, job_id: int, *states: str) -> Any:
        until(lambda: self.state(job_id) in states, f"job {job_id} {' or '.join(states)}")
        return self.job(job_id)

    def log_of(self, job_id: int, attempt: int = 1) -> str:
        return (self.home / "logs" / f"{job_id}.{attempt}.log").read_text(encoding="utf-8", errors="surrogateescape")

    # Jobs that wait for the test

    def gate(self, name: str = "gate") -> Path:
        """`read word < gate` in a job waits until the test writes to it."""
        path = self._scratch / name
        os.mkfifo(path)
        return path

    def start_gated(self, name: str = "gate", **options: Any) -> tuple[int, Path]:
        """A job that runs until the test lets it go, and the gate it stands at."""
        gate = self.gate(name)
        is_there = Path(f"{gate}.reached")
        job_id = self.shell(f": > {is_there}; read word < {gate}", **options)
        until(is_there.exists, "its program at the gate")
        self.until_state(job_id, "running")
        return job_id, gate

    # When all is over

    def close(self) -> None:
        """Ends whatever the test left, by pid, and checks what must hold."""
        try:
            if self.daemon is None:
                self.start()
            if not set(self.counts()) <= FINISHED:
                self.post("/jobs/cancel", ids="all")
                self._kill_the_live()
                self.wait()
        finally:
            self.kill_processes()
            if self.daemon is not None:
                self.stop()
        self.check()

    def _kill_the_live(self) -> None:
        with contextlib.closing(sqlite3.connect(self.home / "queue.db")) as database:
            jobs = database.execute("SELECT job FROM attempts WHERE ended_at IS NULL").fetchall()
        for pid, words in processes_of(self.home):
            if any(words.get("GPUYARD_JOB_ID") == str(job) for (job,) in jobs):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Of jobs; supervisors are of them."""
        return [pid for pid, _ in processes_of(self.home)]

    def kill_processes(self) -> None:
        """What jobs left in the background; supervisors have the same mark, and end by themselves."""
        until(lambda: not list(map(_kill, self.processes())), "the end of all processes")

    def check(self) -> None:
        """The invariants of a queue at rest."""
        assert open_ledger().leases() == ()
        with contextlib.closing(sqlite3.connect(self.home / "queue.db")) as database:
            ask = database.execute
            assert ask("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert ask("PRAGMA foreign_key_check").fetchall() == []
            counted = dict(ask("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
            assert {state: jobs for state, jobs in ask("SELECT state, jobs FROM counts") if jobs} == counted
            assert set(counted) <= FINISHED
            assert ask("SELECT job FROM attempts WHERE ended_at IS NULL OR outcome IS NULL").fetchall() == []
            numbers = ask(
                "SELECT job, group_concat(number) FROM (SELECT * FROM attempts ORDER BY job, number) GROUP BY 1"
            )
            counts = dict(ask("SELECT id, attempts FROM jobs WHERE attempts"))
            assert dict(numbers) == {job: ",".join(map(str, range(1, n + 1))) for job, n in counts.items()}


def submission(*command: str, token: str | None = None, **options: Any) -> dict[str, object]:
    """A submission as it is sent; a name's underscores are dashes."""
    cwd, environment = options.pop("cwd", "/"), options.pop("environment", {"PATH": os.environ["PATH"]})
    files: dict[str, Any] = {name: options.pop(name) for name in ("list", "table") if name in options}
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    return {
        "token": secrets.token_hex(8) if token is None else token,
        "command": command or None,
        "cwd": cwd,
        "environment": environment,
        "options": typed,
        **files,
    }


def processes_of(home: Path) -> list[tuple[int, dict[str, str]]]:
    """Every living process that is marked as one of this queue's jobs, with its environment."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and not is_gone(int(name)):
                content = Path(f"/proc/{name}/environ").read_bytes()
                words = dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if b"=" in item)
                if words.get("GPUYARD_QUEUE") == str(home):
                    found.append((int(name), words))
    return found


def _kill(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture
def own_queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueUnderTest]:
    """Not started yet, for tests that prepare its folder first."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    queue = QueueUnderTest(own_home)
    yield queue
    queue.close()


@pytest.fixture
def queue(own_queue: QueueUnderTest) -> QueueUnderTest:
    own_queue.start()
    return own_queue
