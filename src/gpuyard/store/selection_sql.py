"""A selection of jobs in SQL: the conditions of a WHERE clause, and the query that returns ranges of ids."""

import json
from collections.abc import Sequence

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import JobSelection

IN_RANGES = (
    "jobs.id IN (SELECT selected.id FROM json_each(:ranges) CROSS JOIN jobs AS selected "
    "ON selected.id BETWEEN json_extract(value, '$[0]') AND json_extract(value, '$[1]'))"
)

# The first range of ids in which no job is.
EMPTY_RANGE = (
    "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?) WHERE NOT EXISTS "
    "(SELECT 1 FROM jobs WHERE id BETWEEN json_extract(value, '$[0]') AND json_extract(value, '$[1]')) LIMIT 1"
)


def selection_conditions(selection: JobSelection) -> tuple[list[str], dict[str, object]]:
    """Return the conditions that a row of `jobs` has to meet, and their parameters."""
    clauses: list[str] = []
    values: dict[str, object] = {}
    if selection.ranges:
        clauses.append(IN_RANGES)
        values["ranges"] = json.dumps(selection.ranges)
    if selection.states:
        clauses.append(among(selection.states))
    for column, wanted in (("name", selection.names), ("tag", selection.tags), ("user", selection.users)):
        if wanted:
            # The second condition lets SQLite use the partial indexes, which leave out empty names and tags.
            chosen = f"jobs.{column} IN (SELECT value FROM json_each(:{column}s))"  # noqa: S608 - our own names
            clauses.append(f"{chosen} AND jobs.{column} <> ''")
            values[f"{column}s"] = json.dumps(wanted)
    if selection.since:
        assert selection.since_at is not None
        clauses.append("(jobs.submitted_at >= :since OR jobs.ended_at >= :since)")
        values["since"] = selection.since_at
    return clauses, values


def range_query(clauses: Sequence[str]) -> str:
    """Return the query for the first and the last id of each unbroken run of matching ids."""
    return (
        "SELECT min(id), max(id) FROM (SELECT jobs.id, jobs.id - row_number() OVER (ORDER BY jobs.id) AS island "  # noqa: S608
        f"FROM jobs WHERE {' AND '.join(clauses) or 'true'}) GROUP BY island ORDER BY 1"
    )


def among(states: Sequence[JobState]) -> str:
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"
