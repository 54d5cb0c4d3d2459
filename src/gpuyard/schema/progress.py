"""The progress of a job in answers."""

from msgspec import Struct


class ProgressRow(Struct, frozen=True, kw_only=True):
    """How much of what is done. `percent` is None if the total is unknown. `left_s` is the time that the job still
    needs by its own speed, None if that is not known yet. `at_s` is the run time at which it was read; `told`: by
    `gpuyard.progress` or the file, not from the output."""

    done: float
    total: float | None
    unit: str
    percent: float | None
    left_s: float | None
    at_s: float
    told: bool
