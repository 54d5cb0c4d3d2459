"""Cost of viewers: the daemon's CPU time without viewers, and with twenty, while jobs start and end."""

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

from bench.private_gpuyard import PrivateGpuyard, private_gpuyard
from bench.work import ToolFailed

_SECONDS = 20.0
_VIEWERS = 20
# The routes that the web page and `gpuyard top` watch.
_PAGE = "/status /devices /jobs?limit=50&order=queue&all=1 /timeline?span=1h"
_TOP = "/status /devices /jobs?limit=40"


def bench_viewers() -> None:
    with tempfile.TemporaryDirectory() as folder, private_gpuyard(Path(folder) / "home", "4x24GB") as gpuyard:
        daemon = psutil.Process(gpuyard.status()["pid"])
        gpuyard("submit", "--vram", "6G", "--array", "1-2000", "--", "sleep", "2")
        without = _cpu_load(daemon)
        with _viewers(gpuyard) as received:
            watched = _cpu_load(daemon)
        gpuyard("cancel", "all")
        with contextlib.suppress(ToolFailed):  # `wait` fails, since no job succeeds
            gpuyard("wait")
    print(f"daemon with 16 jobs of 2 s at a time, no viewers   {100 * without:6.1f}% of a core")
    print(f"the same, {_VIEWERS} viewers                            {100 * watched:6.1f}%")
    print(f"cost of {_VIEWERS} viewers                              {100 * (watched - without):6.1f}%")
    print(f"updates per viewer and second                      {sum(received) / _VIEWERS / _SECONDS:6.1f}")


def _cpu_load(daemon: psutil.Process) -> float:
    """Return the part of a core that the daemon uses, averaged over `_SECONDS`."""
    time.sleep(1.0)
    before, began = daemon.cpu_times(), time.perf_counter()
    time.sleep(_SECONDS)
    after, took = daemon.cpu_times(), time.perf_counter() - began
    return float(after.user + after.system - before.user - before.system) / took


@contextlib.contextmanager
def _viewers(gpuyard: PrivateGpuyard) -> Iterator[list[int]]:
    streams = [_connect(gpuyard.socket, _PAGE if number % 2 else _TOP) for number in range(_VIEWERS)]
    received = [0] * _VIEWERS
    readers = [threading.Thread(target=_read, args=(stream, received, n)) for n, stream in enumerate(streams)]
    for reader in readers:
        reader.start()
    try:
        yield received
    finally:
        for stream, reader in zip(streams, readers, strict=True):
            stream.shutdown(socket.SHUT_RDWR)
            reader.join()
            stream.close()


def _connect(path: Path, watched: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(os.fspath(path))
    stream.sendall(f"GET /v1/events?watch={quote(watched)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return stream


def _read(stream: socket.socket, received: list[int], number: int) -> None:
    with stream.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: ") and b'"error"' in line[:120]:
                print(json.loads(line[6:]), file=sys.stderr)
            received[number] += line.startswith(b"data: ")
