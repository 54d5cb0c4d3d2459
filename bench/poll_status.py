"""Requests the daemon's status every 5 ms until standard input ends; then prints the number of requests, the median and
the slowest response time.

A separate process, so that the benchmark's own work does not delay it.
"""

import select
import socket
import statistics
import sys
import time

_INTERVAL_S = 0.005
_REQUEST = b"GET /v1/status HTTP/1.1\r\nHost: gpuyard\r\nConnection: close\r\n\r\n"


def response_s(path: str) -> float:
    started = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(_REQUEST)
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    if not response.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"unexpected response to GET /status: {response[:80]!r}")
    return time.perf_counter() - started


def poll_until_input(path: str) -> list[float]:
    taken = [response_s(path)]
    print("polling", flush=True)
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        taken.append(response_s(path))
    return taken


if __name__ == "__main__":
    seconds = poll_until_input(sys.argv[1])
    print(len(seconds), statistics.median(seconds), max(seconds))
