"""From an error to the problem that a snapshot carries."""

from gpuyard.core.snapshot import Problem, Vendor
from gpuyard.errors import ProbeError


def as_problem(error: ProbeError, vendor: Vendor, about: str | None = None) -> Problem:
    """`about` says which part of the tool's work it concerns, where the rest went well."""
    return Problem(
        source=error.source,
        kind=error.kind,
        message=f"{about}: {error.message}" if about else error.message,
        hint=error.hint,
        vendor=vendor,
    )
