"""The floor of the comparison: a bare loop that starts a program whenever a slot is free, and does nothing else."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from bench.work import Tool, Work

# The `exit` keeps the shell from replacing itself by the command: a supervisor has to outlive its job.
_SUPERVISED = ("sh", "-c", '"$@"; exit $?', "sh")


def floors() -> list[Tool]:
    return [
        _floor("bare posix_spawn loop", lambda work: _spawn_all(work, work.command)),
        _floor("the same with sh -c around", lambda work: _spawn_all(work, (*_SUPERVISED, *work.command))),
        _floor(
            "the same, and a log for each job",
            lambda work: _spawn_all(work, (*_SUPERVISED, *work.command), lambda number: work.folder / f"{number}.log"),
        ),
    ]


def _floor(name: str, run: Callable[[Work], float]) -> Tool:
    return Tool(name=name, run=run, is_own=True)


def _spawn_all(work: Work, command: tuple[str, ...], log_of: Callable[[int], Path] | None = None) -> float:
    started = time.perf_counter()
    for number in range(work.count):
        if number >= work.slots:
            os.wait()
        os.posix_spawnp(command[0], command, os.environ, file_actions=_output(log_of(number)) if log_of else ())
    for _ in range(min(work.slots, work.count)):
        os.wait()
    return time.perf_counter() - started


def _output(log: Path) -> list[tuple[int, ...]]:
    return [
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),  # type: ignore[list-item]
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
