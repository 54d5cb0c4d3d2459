"""Convert a ProbeError into a Problem of a snapshot."""

from gpuyard.core.snapshot import Problem, Vendor
from gpuyard.errors import ProbeError


def as_problem(error: ProbeError, vendor: Vendor, about: str | None = None) -> Problem:
    """Return the problem; `about` names the failed part when the rest of the reading succeeded."""
    return Problem(
        source=error.source,
        kind=error.kind,
        message=f"{about}: {error.message}" if about else error.message,
        hint=error.hint,
        vendor=vendor,
    )
