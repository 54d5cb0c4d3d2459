"""What viewers cost the queue: the daemon's CPU time with nobody looking, and with twenty, while jobs come and go."""

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil

from bench.work import ToolFailed
from bench.yard import Yard, yard

_SECONDS = 20.0
_VIEWERS = 20
# As the page and `gpuyard top` ask.
_PAGE = "/status /devices /jobs?limit=50&order=queue&all=1 /timeline?span=1h"
_TOP = "/status /devices /jobs?limit=40"


def bench_viewers() -> None:
    with tempfile.TemporaryDirectory() as folder, yard(Path(folder) / "home", "4x24GB") as ours:
        daemon = psutil.Process(ours.status()["pid"])
        ours("submit", "--vram", "6G", "--array", "1-2000", "--", "sleep", "2")
        alone = _busy(daemon)
        with _viewers(ours) as heard:
            watched = _busy(daemon)
        ours("cancel", "all")
        with contextlib.suppress(ToolFailed):  # none of them succeeds
            ours("wait")
    print(f"daemon with 16 jobs of 2 s at a time, nobody looks {100 * alone:6.1f}% of a core")
    print(f"the same, {_VIEWERS} viewers                            {100 * watched:6.1f}%")
    print(f"what {_VIEWERS} viewers cost                            {100 * (watched - alone):6.1f}%")
    print(f"each was told {sum(heard) / _VIEWERS / _SECONDS:.1f} times a second")


def _busy(daemon: psutil.Process) -> float:
    """Part of a core, over a while."""
    time.sleep(1.0)
    before, began = daemon.cpu_times(), time.perf_counter()
    time.sleep(_SECONDS)
    after, took = daemon.cpu_times(), time.perf_counter() - began
    return float(after.user + after.system - before.user - before.system) / took


@contextlib.contextmanager
def _viewers(ours: Yard) -> Iterator[list[int]]:
    links = [_connect(ours.socket, _PAGE if number % 2 else _TOP) for number in range(_VIEWERS)]
    heard = [0] * _VIEWERS
    readers = [threading.Thread(target=_read, args=(link, heard, number)) for number, link in enumerate(links)]
    for reader in readers:
        reader.start()
    try:
        yield heard
    finally:
        for link, reader in zip(links, readers, strict=True):
            link.shutdown(socket.SHUT_RDWR)
            reader.join()
            link.close()


def _connect(path: Path, watched: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.fspath(path))
    link.sendall(f"GET /v1/events?watch={quote(watched)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return link


def _read(link: socket.socket, heard: list[int], number: int) -> None:
    with link.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: ") and b'"error"' in line[:120]:
                print(json.loads(line[6:]), file=sys.stderr)
            heard[number] += line.startswith(b"data: ")
