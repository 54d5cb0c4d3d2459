"""Response times of pages of the queue and of searches, with 100,000 jobs that wait in 20 lanes.

Each is printed with the slowest response to another client's small request meanwhile, which is the longest time that
the daemon's loop was blocked.
"""

import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from bench.private_gpuyard import PrivateGpuyard, private_gpuyard
from bench.work import percentile

_TAGS, _PRIORITIES, _EACH = 5, 4, 5_000
_TIMES = 9
_PAGES = {
    "50 jobs, from the first on": "/jobs?limit=50",
    "50 jobs, from 50,000 on": "/jobs?limit=50&after=50000",
    "50 jobs, from 99,950 on": "/jobs?limit=50&after=99950",
    "50 jobs, the newest, from 50,000 on": "/jobs?limit=50&after=50000&order=newest",
    "search of 'seed=4999'": f"/jobs?limit=50&search={quote('seed=4999')}",
    "search that all jobs match": "/jobs?limit=50&search=train",
    "search that no job matches": "/jobs?limit=50&search=nowhere",
    "a tag": "/jobs?limit=50&tag=night3",
}


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("gpuyard")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def get(self, path: str) -> bytes:
        self.request("GET", f"/v1{path}")
        response = self.getresponse()
        body = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: {body.decode()}")
        return body


def bench_pages() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        private_gpuyard(Path(folder) / "home", "2x24GB") as gpuyard,
    ):
        _fill(gpuyard)
        connection = _SocketConnection(gpuyard.socket)
        print(f"{'100,000 jobs wait in 20 lanes':<44}{'median':>9}{'slowest':>10}{'others waited':>15}")
        for what, path in _PAGES.items():
            took, blocked_s = _measure(gpuyard.socket, partial(connection.get, path))
            print(f"{what:<44}{_ms(percentile(took, 50))}{_ms(max(took)):>10}{_ms(blocked_s):>15}")
        total = json.loads(connection.get("/jobs?limit=1&search=train"))["total"]
        assert total == _TAGS * _PRIORITIES * _EACH, total
        connection.close()


def _fill(gpuyard: PrivateGpuyard) -> None:
    gpuyard("pause")
    command = ("--", "python", "train.py", "--out", "/data/runs", "seed={index}")
    for tag in range(_TAGS):
        for priority in range(_PRIORITIES):
            gpuyard("submit", "--gpus", "0", "--tag", f"night{tag}", "--priority", str(priority),
                 "--array", f"1-{_EACH}", *command)  # fmt: skip


def _measure(path: Path, request: Callable[[], object]) -> tuple[list[float], float]:
    """Return the seconds of each request, and of the slowest small request of another client meanwhile."""
    is_over = threading.Event()
    waits = [0.0]
    other = threading.Thread(target=_small_requests, args=(path, is_over, waits))
    other.start()
    took = [_seconds(request) for _ in range(_TIMES)]
    is_over.set()
    other.join()
    return took, max(waits)


def _small_requests(path: Path, is_over: threading.Event, waits: list[float]) -> None:
    connection = _SocketConnection(path)
    while not is_over.wait(0.002):
        waits.append(_seconds(lambda: connection.get("/jobs/1/history")))
    connection.close()


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:6.1f} ms"
