"""What the rows of the queue stand for: a job, or all runs of a sweep or an array. All pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from gpuyard.core.job.selection import format_ids
from gpuyard.ui.tui.row_window import Row

# What tells a row from others: the id of a job, or all ids of a sweep, such as "18-57".
RowKey: TypeAlias = int | str


def count_jobs(rows: Iterable[Row], is_counted: Callable[[str], bool] = lambda _: True) -> int:
    """Return the number of jobs that the rows stand for, in the states that count."""
    return sum(jobs for row in rows for state, jobs in states_of(row).items() if is_counted(state))


def states_of(row: Row) -> Mapping[str, int]:
    counts: Mapping[str, int] = row["group"]["counts"] if row.get("group") else {row["state"]: 1}
    return counts


def ids_text(keys: Iterable[RowKey]) -> str:
    keys = list(keys)
    sweeps = [key for key in keys if isinstance(key, str)]
    return " ".join([*sweeps, *filter(None, [format_ids([key for key in keys if isinstance(key, int)])])])
