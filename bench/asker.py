"""Asks the daemon for its status every 5 ms until its input ends; then prints how often, the median and the slowest.

A program of its own, so that it is not held up by what it watches.
"""

import select
import socket
import statistics
import sys
import time

_EVERY_S = 0.005
_QUESTION = b"GET /v1/status HTTP/1.1\r\nHost: gpuyard\r\nConnection: close\r\n\r\n"


def ask(path: str) -> float:
    started = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(_QUESTION)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"GET /status was answered with {answer[:80]!r}")
    return time.perf_counter() - started


def ask_until_told(path: str) -> list[float]:
    taken = [ask(path)]
    print("asking", flush=True)
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        taken.append(ask(path))
    return taken


if __name__ == "__main__":
    answers = ask_until_told(sys.argv[1])
    print(len(answers), statistics.median(answers), max(answers))
