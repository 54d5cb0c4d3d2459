"""A suspender that cannot suspend any job."""

from collections.abc import Mapping

from gpuyard.model.job import Attempt
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.ports import SuspendResult


class NoSuspender:
    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        return "jobs cannot be suspended here"

    def suspend(self, attempt: Attempt) -> None: ...

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None: ...

    def can_park(self, attempt: Attempt) -> bool:
        return False

    def moved(self) -> list[SuspendResult]:
        return []
