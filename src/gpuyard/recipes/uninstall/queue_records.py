"""Read from the queue's database the files of tasks elsewhere and the number of unfinished jobs. Never writes."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from gpuyard.store.database import open_reader

_TASKS = """
SELECT DISTINCT
    json_extract(body, '$.task.workspace'), json_extract(body, '$.task.log'),
    json_extract(body, '$.task.other_log'), json_extract(body, '$.task.scheduler_log')
FROM specs WHERE json_extract(body, '$.task.workspace') IS NOT NULL
"""
_UNFINISHED = "SELECT state, count(*) FROM jobs WHERE ended_at IS NULL GROUP BY state ORDER BY state"


class TaskFiles(Struct, frozen=True):
    workspace: str
    logs: tuple[str, ...]


def task_files(state: Path) -> list[TaskFiles]:
    """Return the workspaces and log files of the queue's tasks, as absolute paths."""
    with _reading(state) as database:
        rows = [] if database is None else database.execute(_TASKS).fetchall()
    found = []
    for workspace, *logs in rows:
        if os.path.isabs(workspace):
            found.append(TaskFiles(workspace, tuple(log for log in logs if log and os.path.isabs(log))))
    return found


def unfinished_jobs(state: Path) -> dict[str, int]:
    """Return how many jobs run or wait, by state."""
    with _reading(state) as database:
        return {} if database is None else dict(database.execute(_UNFINISHED).fetchall())


@contextlib.contextmanager
def _reading(state: Path) -> Iterator[sqlite3.Connection | None]:
    path = state / "queue.db"
    if not path.is_file():
        yield None
        return
    try:
        with contextlib.closing(open_reader(path)) as database:
            yield database
    except (sqlite3.DatabaseError, EnvironmentFault) as error:
        raise EnvironmentFault(
            f"cannot read {path}, so it is unknown whether jobs run or wait: {error}",
            hint=f"check with `gpuyard queue`; if no job runs, move {path} away and try again",
        ) from error
