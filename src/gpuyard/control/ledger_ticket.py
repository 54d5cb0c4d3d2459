"""The queue's place in the ledger's line, for the job that others of its own wait for."""

import contextlib

from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import LeaseLedger

# So long a job waits before others in the ledger are told of it: most waits are over by then, and a ticket is a file.
IN_LINE_AFTER_S = 0.25
_OUR_OWN_DOING = frozenset({ReasonKind.PAUSED, ReasonKind.NO_ENGINE})


class QueueTicket:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases
        self._head_since: tuple[int, float] | None = None

    def stand(self, head: WaitingJob | None, now: float, *, has_started: bool) -> None:
        """One who has just been served goes behind those who wait already."""
        if head is None or has_started:
            self._leases.return_ticket()
            self._head_since = None
        if head is None:
            return
        if self._head_since is None or self._head_since[0] != head.lane.id:
            self._head_since = (head.lane.id, now)
        is_for_others = not any(reason.kind in _OUR_OWN_DOING for reason in head.reasons)
        if now - self._head_since[1] >= IN_LINE_AFTER_S and is_for_others:
            with contextlib.suppress(EnvironmentFault):
                self._leases.take_ticket(head.need, head.lane.priority, f"job {head.job_id}")

    def wake_at(self, now: float) -> float | None:
        """When it is time to enter the line."""
        if self._head_since is None or self._leases.my_ticket() is not None:
            return None
        enters_at = self._head_since[1] + IN_LINE_AFTER_S
        return enters_at if now < enters_at else None
