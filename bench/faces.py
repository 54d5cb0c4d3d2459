"""What the pages cost: a page of the queue at any place, and a search, over 100,000 jobs that wait in many lanes.

Beside each, the longest that somebody else's small request had to wait meanwhile: so long was the loop held up at most.
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

from bench.work import percentile
from bench.yard import Yard, yard

_TAGS, _PRIORITIES, _EACH = 5, 4, 5_000
_TIMES = 9
_PAGES = {
    "50 jobs, from the first on": "/jobs?limit=50",
    "50 jobs, from 50,000 on": "/jobs?limit=50&after=50000",
    "50 jobs, from 99,950 on": "/jobs?limit=50&after=99950",
    "50 jobs, the newest, from 50,000 on": "/jobs?limit=50&after=50000&order=newest",
    "search of 'seed=4999'": f"/jobs?limit=50&search={quote('seed=4999')}",
    "search of what all have": "/jobs?limit=50&search=train",
    "search of what none has": "/jobs?limit=50&search=nowhere",
    "a tag": "/jobs?limit=50&tag=night3",
}


class _Link(http.client.HTTPConnection):
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


def bench_faces() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, yard(Path(folder) / "home", "2x24GB") as ours:
        _fill(ours)
        link = _Link(ours.socket)
        print(f"{'100,000 jobs wait in 20 lanes':<44}{'median':>9}{'slowest':>10}{'others waited':>15}")
        for what, path in _PAGES.items():
            took, held_up = _measured(ours.socket, partial(link.get, path))
            print(f"{what:<44}{_ms(percentile(took, 50))}{_ms(max(took)):>10}{_ms(held_up):>15}")
        total = json.loads(link.get("/jobs?limit=1&search=train"))["total"]
        assert total == _TAGS * _PRIORITIES * _EACH, total
        link.close()


def _fill(ours: Yard) -> None:
    ours("pause")
    command = ("--", "python", "train.py", "--out", "/data/runs", "seed={index}")
    for tag in range(_TAGS):
        for priority in range(_PRIORITIES):
            ours("submit", "--gpus", "0", "--tag", f"night{tag}", "--priority", str(priority),
                 "--array", f"1-{_EACH}", *command)  # fmt: skip


def _measured(path: Path, ask: Callable[[], object]) -> tuple[list[float], float]:
    """How long each took, and how long another who asks for little had to wait at most."""
    is_over = threading.Event()
    waits = [0.0]
    other = threading.Thread(target=_ask_on, args=(path, is_over, waits))
    other.start()
    took = [_seconds(ask) for _ in range(_TIMES)]
    is_over.set()
    other.join()
    return took, max(waits)


def _ask_on(path: Path, is_over: threading.Event, waits: list[float]) -> None:
    link = _Link(path)
    while not is_over.wait(0.002):
        waits.append(_seconds(lambda: link.get("/jobs/1/story")))
    link.close()


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:6.1f} ms"
