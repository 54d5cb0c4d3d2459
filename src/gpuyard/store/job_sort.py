"""The orders of a list of jobs that a user can choose: by one column, up or down. Jobs without a value come last."""

from gpuyard.core.job.lifecycle import WAITING

_STATES = (
    "running", "resuming", "stopping", "pending", "suspending", "suspended", "queued", "delayed", "blocked", "held",
    "failed", "rejected", "succeeded", "cancelled",
)  # fmt: skip
_SORT_RANKS = " ".join(f"WHEN '{state}' THEN {rank}" for rank, state in enumerate(_STATES))
_WAITING = ", ".join(repr(str(state)) for state in sorted(WAITING))
_LAST_ATTEMPT = "FROM attempts WHERE attempts.job = jobs.id ORDER BY number DESC LIMIT 1"
SORT_VALUES = {
    "id": "jobs.id",
    "state": f"CASE state {_SORT_RANKS} END",
    "name": "coalesce(jobs.name, jobs.command, (SELECT specs.command FROM specs WHERE specs.id = spec)) COLLATE NOCASE",
    "reason": "nullif(jobs.reason, '') COLLATE NOCASE",
    "gpu": f"(SELECT devices {_LAST_ATTEMPT})",
    "memory": f"(SELECT reserved_mb {_LAST_ATTEMPT})",
    "priority": "priority",
    # As the list shows it: the run time, or the waiting time of a job that has not started.
    "time": f"CASE WHEN state IN ({_WAITING}) THEN :now - jobs.submitted_at "
    "ELSE coalesce(jobs.ended_at, :now) - jobs.started_at END",
}


def order_clause(order: str) -> str:
    """Return the ORDER BY of an order such as `name` or `-time`; it may need the parameter `now`.

    Jobs with equal values come with the newest first.
    """
    value, direction = SORT_VALUES[order.removeprefix("-")], "DESC" if order.startswith("-") else "ASC"
    return f"ORDER BY ({value}) IS NULL, {value} {direction}, jobs.id DESC"
