"""How long large requests hold the daemon's loop. While it is held, no request is answered and no job starts.

For each request: how long it took, and the slowest response to another client's `GET /status` meanwhile. A daemon
without jobs is the floor.
"""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.private_gpuyard import PrivateGpuyard, private_gpuyard
from bench.work import ToolFailed

_LANES, _EACH = 20, 5_000
_JOBS = _LANES * _EACH
_DEPENDANTS, _RUNNING, _IDS = 20_000, 60, 10_000
_PROCESSES, _STOPPED = 3_000, 2
_FLOOR_S, _LIMIT_S, _LOOK_S = 3.0, 60.0, 0.02
Act = Callable[[], object]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("gpuyard", timeout=_LIMIT_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_LIMIT_S)
        self.sock.connect(self._path)


class _Queue:
    """A queue of its own, and what the requests of this benchmark need."""

    def __init__(self, gpuyard: PrivateGpuyard) -> None:
        self.run = gpuyard
        self.home = gpuyard.home
        self._path = gpuyard.socket

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with contextlib.closing(_Connection(self._path)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
        if response.status != 200:
            raise ToolFailed(f"{method} {path}: {answer.decode()[:200]}")
        return answer

    def get(self, path: str) -> bytes:
        return self.ask("GET", f"/v1{path}")

    def post(self, path: str, **body: Any) -> bytes:
        return self.ask("POST", f"/v1{path}", body)

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.get("/status"))["counts"]
        return counts

    def until(self, is_done: Callable[[dict[str, int]], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not is_done(self.counts()):
            if time.monotonic() > deadline:
                raise ToolFailed(f"not done within {_LIMIT_S:.0f} s: {self.counts()}")
            time.sleep(_LOOK_S)

    def submit(self, *arguments: str) -> int:
        """Submit jobs; return the id of the first."""
        return int(re.split(r"\D+", self.run("submit", *arguments).strip())[0])

    def measure(self, what: str, act: Act) -> None:
        with _polled(self._path) as slowest_s:
            started = time.perf_counter()
            act()
            took_s = time.perf_counter() - started
        print(f"{what:<50}{took_s:10.2f} s{slowest_s[0] * 1e3:13.1f} ms", flush=True)


@contextlib.contextmanager
def _polled(path: Path) -> Iterator[list[float]]:
    """Ask for the status all the time; the yielded list has the slowest response afterwards."""
    poller = subprocess.Popen(
        [sys.executable, "-m", "bench.poll_status", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert poller.stdout is not None
    if not poller.stdout.readline():
        raise ToolFailed("the daemon did not answer GET /status")
    slowest: list[float] = []
    try:
        yield slowest
    finally:
        slowest.append(float(poller.communicate()[0].split()[2]))


def bench_stalls(names: Sequence[str]) -> None:
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"unknown part: {', '.join(unknown)}; parts are: {', '.join(PARTS)}")
    print(f"{'':<50}{'took':>12}{'others waited':>16}")
    for name in names or PARTS:
        with (
            tempfile.TemporaryDirectory(prefix="bench-") as folder,
            private_gpuyard(Path(folder) / "home", f"{_RUNNING}x24GB" if name == "running" else "2x24GB") as gpuyard,
        ):
            PARTS[name](_Queue(gpuyard))
    print()


def _bench_floor(queue: _Queue) -> None:
    queue.measure(f"nothing, for {_FLOOR_S:.0f} s", lambda: time.sleep(_FLOOR_S))


def _bench_running(queue: _Queue) -> None:
    queue.submit("--exclusive", "--array", f"1-{_RUNNING}", "--", "sleep", "600")
    queue.until(lambda counts: counts["running"] == _RUNNING)

    def cancel() -> None:
        queue.run("cancel", "all")
        queue.until(lambda counts: counts["cancelled"] == _RUNNING)

    queue.measure(f"cancel all, with {_RUNNING} running jobs", cancel)


def _bench_processes(queue: _Queue) -> None:
    """Stop jobs on a machine with thousands of processes: the processes of a job are found among them."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(_PROCESSES)]
    try:
        queue.submit("--gpus", "0", "--array", f"1-{_STOPPED}", "--", "sleep", "600")
        queue.until(lambda counts: counts["running"] == _STOPPED)
        queue.measure(f"show of a running job, {_PROCESSES:,} processes", lambda: queue.get("/jobs/1"))

        def cancel() -> None:
            queue.run("cancel", "all")
            queue.until(lambda counts: counts["cancelled"] == _STOPPED)

        queue.measure(f"cancel of {_STOPPED} running, {_PROCESSES:,} processes", cancel)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


def _bench_start(queue: _Queue) -> None:
    def start() -> None:
        queue.submit("--gpus", "0", "--", "sleep", "600")
        queue.until(lambda counts: counts["running"] == 1)

    queue.measure("the first job, for which a keeper starts", start)
    queue.run("cancel", "all")


def _bench_dependants(queue: _Queue) -> None:
    for status, state in ((0, "queued"), (1, "rejected")):
        marker = queue.home / f"go-{status}"
        loop = f"until test -e {marker}; do sleep 0.05; done; exit {status}"
        first = queue.submit("--gpus", "0", "--", "sh", "-c", loop)
        queue.until(lambda counts: counts["running"] == 1)
        queue.run("pause")
        queue.submit("--gpus", "0", "--after", str(first), "--array", f"1-{_DEPENDANTS}", "--", "true")

        def end(marker: Path = marker, state: str = state) -> None:
            marker.touch()
            queue.until(lambda counts: counts[state] == _DEPENDANTS)

        queue.measure(f"a job ends, and {_DEPENDANTS:,} dependants are {state}", end)
        if state == "queued":
            queue.measure(f"cancel of {_DEPENDANTS:,} dependants", lambda: queue.run("cancel", "all"))
        queue.run("unpause")
    lost = queue.submit("--gpus", "0", "--hold", "--", "true")
    array = ("--gpus", "0", "--after", str(lost), "--array", f"1-{_DEPENDANTS}", "--", "true")
    queue.measure(f"submit of {_DEPENDANTS:,} dependants", lambda: queue.submit(*array))
    queue.measure(f"show of a job with {_DEPENDANTS:,} dependants", lambda: queue.get(f"/jobs/{lost}"))
    queue.measure(f"cancel of a job with {_DEPENDANTS:,} dependants", lambda: queue.post("/jobs/cancel", ids=[lost]))
    queue.run("pause")
    queue.measure(f"retry of it, and {_DEPENDANTS:,} wait again", lambda: queue.post("/jobs/retry", ids=[lost]))


def _bench_many(queue: _Queue) -> None:
    queue.run("pause")
    command = ("--", "python", "train.py", "seed={index}")
    array = ("--gpus", "0", "--array", f"1-{_JOBS}")
    queue.measure(f"submit of an array of {_JOBS:,}", lambda: queue.submit(*array, *command))
    queue.measure(f"cancel of {_JOBS:,} jobs", lambda: queue.run("cancel", "all"))
    queue.measure(f"retry of {_JOBS:,} jobs", lambda: queue.run("retry", "--all", "all"))
    queue.run("cancel", "all")
    queue.measure(f"clean of {_JOBS:,} finished jobs", lambda: queue.run("clean", "--older-than", "0s"))


def _bench_lists(queue: _Queue) -> None:
    queue.run("pause")
    first = 0
    for lane in range(_LANES):
        options = ("--gpus", "0", "--tag", f"night{lane % 5}", "--priority", str(lane // 5))
        started = queue.submit(*options, "--array", f"1-{_EACH}", "--", "python", "train.py", "seed={index}")
        first = first or started
    queue.measure(f"first deep page of {_JOBS:,} in {_LANES} lanes", lambda: queue.get("/jobs?limit=50&after=50000"))
    queue.measure("GET /jobs?limit=10000", lambda: queue.get("/jobs?limit=10000"))
    queue.measure("gpuyard queue --limit 10000", lambda: queue.run("queue", "--limit", "10000"))
    ids = list(range(first, first + 2 * _IDS, 2))
    queue.measure(f"hold of {_IDS:,} separate ids", lambda: queue.post("/jobs/hold", ids=ids))
    queue.measure(f"cancel of {_IDS:,} separate ids", lambda: queue.post("/jobs/cancel", ids=ids))
    queue.measure("GET /jobs?limit=10000&state=cancelled", lambda: queue.get("/jobs?limit=10000&state=cancelled"))
    queue.measure(f"priority of {_JOBS:,} jobs", lambda: queue.post("/jobs/priority", ids="all", priority=3))
    edit = {"ids": "all", "options": {"duration": "1h"}}
    queue.measure(f"edit of {_JOBS:,} jobs", lambda: queue.post("/jobs/edit", **edit))
    queue.measure("search that all jobs match", lambda: queue.get("/jobs?limit=50&search=train"))
    sweep = str(queue.submit("--gpus", "0", "--sweep", f"lr=1..{_IDS}", "--", "python", "train.py", "{lr}"))
    queue.measure(f"queue --sweep --sort, {_IDS:,} jobs", lambda: queue.run("queue", "--sweep", sweep, "--sort", "-lr"))
    queue.measure(f"summary over {_JOBS:,} jobs", lambda: queue.get("/summary"))
    queue.measure("wait for all, for a second", lambda: queue.get("/wait?timeout=1"))


PARTS: dict[str, Callable[[_Queue], None]] = {
    "floor": _bench_floor,
    "start": _bench_start,
    "running": _bench_running,
    "processes": _bench_processes,
    "dependants": _bench_dependants,
    "many": _bench_many,
    "lists": _bench_lists,
}
