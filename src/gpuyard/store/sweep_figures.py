"""The figures that the runs of a sweep have printed, such as loss, for columns of its table."""

import sqlite3
from collections.abc import Mapping

from gpuyard.core.progress.job_progress import MOST_FIGURES
from gpuyard.store.folded_queue import GroupCounts

FIGURE = "figure"
# The last values by job and name. None: it was no finite number.
LiveFigures = Mapping[int, Mapping[str, float | None]]

_LAST_FIGURES = (
    "FROM attempts JOIN json_each(attempts.usage, '$.progress.figures') AS figures "
    "WHERE attempts.job = jobs.id AND attempts.number = jobs.attempts"
)
_NAMES = (
    "SELECT figures.key FROM jobs JOIN attempts ON attempts.job = jobs.id AND attempts.number = jobs.attempts "
    "JOIN json_each(attempts.usage, '$.progress.figures') AS figures WHERE jobs.id BETWEEN ? AND ? "
    "GROUP BY figures.key ORDER BY count(*) DESC, figures.key LIMIT ?"
)


def stored_names(connection: sqlite3.Connection, group: GroupCounts) -> list[str]:
    """Return the names of stored figures, those that most runs have first. Reads all runs of the group."""
    return [name for (name,) in connection.execute(_NAMES, (group.first, group.last, 2 * MOST_FIGURES))]


def live_names(group: GroupCounts, live: LiveFigures) -> list[str]:
    """Return the names of figures that running jobs of the group have."""
    return [name for job_id, figures in live.items() if group.first <= job_id <= group.last for name in figures]


def figure_sql(name: str) -> str:
    """Return the last value of a figure as an SQL expression over `jobs`."""
    literal = "'" + name.replace("'", "''") + "'"
    return f"(SELECT json_extract(figures.value, '$.last') {_LAST_FIGURES} AND figures.key = {literal})"
