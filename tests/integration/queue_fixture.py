"""A queue for one test: the real daemon, simulated GPUs, real jobs, and checks of the invariants at the end."""

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

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import DaemonConnection
from gpuyard.ledger.ledger import open_ledger
from gpuyard.model.lifecycle import FINISHED
from tests.fakes.queue_command import run

DEADLINE_S = 90.0
DAEMON = (sys.executable, "-m", "gpuyard.daemon")
_RUNS = "the daemon is running"


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], 0.02)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def end_leftovers(home: Path) -> None:
    """End the daemon and the jobs that a test left, even if the commands under test are broken."""
    lock = home / "daemon.lock"
    pid = running_pid(lock)
    if pid is not None:
        run("cancel", "all")
        run("wait", "all", "--timeout", "30s")
        os.kill(pid, signal.SIGTERM)
        until(lambda: running_pid(lock) != pid, f"the end of the daemon {pid}")


class Daemon:
    """A daemon process as a child; its log is read as it is written."""

    def __init__(self, command: Sequence[str] = DAEMON) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.pid = self._process.pid
        self._ready_or_ended = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if _RUNS in line:
                self._ready_or_ended.set()
        self._ready_or_ended.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def serves(self) -> bool:
        """Wait until the daemon serves or ends, and return whether it serves. If not, `log` says why."""
        assert self._ready_or_ended.wait(DEADLINE_S), "the daemon neither runs nor ends"
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
    """The queue in GPUYARD_HOME, used through its socket."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = DaemonConnection(str(home / "daemon.sock"), may_start=False)
        self.daemon: Daemon | None = None
        self._scratch = home.parent
        self.lacks_attempts = False  # its database is older than some attempts, whose numbers are not given again

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
        """Wait for a daemon that ends by itself, and return it."""
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
        """Submit, and return the answer. `cwd`, `environment`, `list` and `table` are fields, the rest are options."""
        return self.client.request(
            "POST", "/submissions", body=submission(*command, token=token, **options), timeout_s=DEADLINE_S
        )

    def submit(self, *command: str, **options: Any) -> int:
        """Submit, and return the id of the (first) job."""
        return int(self.send(*command, **options)["first"])

    def shell(self, script: str, **options: Any) -> int:
        return self.submit("/bin/sh", "-c", script, **options)

    def job(self, job_id: int) -> Any:
        return self.get(f"/jobs/{job_id}")

    def state(self, job_id: int) -> str:
        return str(self.job(job_id)["state"])

    def why(self, job_id: int) -> str:
        answer = self.get(f"/jobs/{job_id}/why")
        return "\n".join(
            [answer["summary"], *(f"{reason['text']}\n{reason['remedy']}" for reason in answer["reasons"])]
        )

    def counts(self) -> dict[str, int]:
        """Return the number of jobs per state, without empty states."""
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
        """Return a new pipe: `read word < gate` in a job waits until the test writes to it."""
        path = self._scratch / name
        os.mkfifo(path)
        return path

    def start_gated(self, name: str = "gate", **options: Any) -> tuple[int, Path]:
        """Start a job that runs until the test writes to its gate. Return its id and the gate."""
        gate = self.gate(name)
        reached = Path(f"{gate}.reached")
        job_id = self.shell(f": > {reached}; read word < {gate}", **options)
        until(reached.exists, "its program at the gate")
        self.until_state(job_id, "running")
        return job_id, gate

    # At the end of a test

    def close(self) -> None:
        """End the processes that the test left, by pid, and check the invariants."""
        try:
            if self.daemon is None:
                self.start()
            if not set(self.counts()) <= FINISHED:
                self.post("/jobs/cancel", ids="all")
                self._kill_running_attempts()
                self.wait()
        finally:
            self.kill_processes()
            if self.daemon is not None:
                self.stop()
        self.check()

    def _kill_running_attempts(self) -> None:
        with contextlib.closing(sqlite3.connect(self.home / "queue.db")) as database:
            jobs = database.execute("SELECT job FROM attempts WHERE ended_at IS NULL").fetchall()
        for pid, variables in processes_of(self.home):
            if any(variables.get("GPUYARD_JOB_ID") == str(job) for (job,) in jobs):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the pids of all jobs, including supervisors."""
        return [pid for pid, _ in processes_of(self.home)]

    def kill_processes(self) -> None:
        """Kill the background processes of jobs. Supervisors carry the same variable, and end by themselves."""
        until(lambda: not list(map(_kill, self.processes())), "the end of all processes")

    def check(self) -> None:
        """Check the invariants of a queue without active jobs."""
        assert open_ledger().leases() == ()
        with contextlib.closing(sqlite3.connect(self.home / "queue.db")) as database:
            query = database.execute
            assert query("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert query("PRAGMA foreign_key_check").fetchall() == []
            counted = dict(query("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
            assert {state: jobs for state, jobs in query("SELECT state, jobs FROM counts") if jobs} == counted
            assert set(counted) <= FINISHED
            assert query("SELECT job FROM attempts WHERE ended_at IS NULL OR outcome IS NULL").fetchall() == []
            numbers = query(
                "SELECT job, group_concat(number) FROM (SELECT * FROM attempts ORDER BY job, number) GROUP BY 1"
            )
            counts = dict(query("SELECT id, attempts FROM jobs WHERE attempts"))
            every = {job: ",".join(map(str, range(1, n + 1))) for job, n in counts.items()}
            assert self.lacks_attempts or dict(numbers) == every


def submission(*command: str, token: str | None = None, **options: Any) -> dict[str, object]:
    """Return the body of a submission. Underscores in option names become dashes."""
    cwd, environment = options.pop("cwd", "/"), options.pop("environment", {"PATH": os.environ["PATH"]})
    files: dict[str, Any] = {name: options.pop(name) for name in ("list", "table") if name in options}
    named_options = {name.replace("_", "-"): value for name, value in options.items()}
    return {
        "token": secrets.token_hex(8) if token is None else token,
        "command": command or None,
        "cwd": cwd,
        "environment": environment,
        "options": named_options,
        **files,
    }


def processes_of(home: Path) -> list[tuple[int, dict[str, str]]]:
    """Return every live process that carries this queue's GPUYARD_QUEUE, with its environment."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and not is_gone(int(name)):
                content = Path(f"/proc/{name}/environ").read_bytes()
                variables = dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if b"=" in item)
                if variables.get("GPUYARD_QUEUE") == str(home):
                    found.append((int(name), variables))
    return found


def _kill(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture
def own_queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueUnderTest]:
    """A queue before its daemon is started, for tests that prepare its folder first."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    queue = QueueUnderTest(own_home)
    yield queue
    queue.close()


@pytest.fixture
def queue(own_queue: QueueUnderTest) -> QueueUnderTest:
    own_queue.start()
    return own_queue
