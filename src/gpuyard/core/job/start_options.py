"""The options that say when a job starts: `--at` and `--stagger`."""

from gpuyard.core.job.moments import parse_moment
from gpuyard.errors import UserError


def parse_start(at: str | None) -> str | None:
    """Return the moment as it was given, once it is known to be one."""
    if at is not None:
        parse_moment(at)
    return at


def parse_stagger(stagger_s: float, count: int) -> float:
    """Return the time between two starts of an array of `count` jobs."""
    if stagger_s and count < 2:
        raise UserError(
            "--stagger is a pause between the starts of several jobs, and this is one",
            hint="give --array, --sweep or --from, or leave it out; --in delays a single job",
        )
    return stagger_s
