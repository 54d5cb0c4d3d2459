"""Programs beside the jobs of this queue, by their leases: scripts, `gpuyard run`, and jobs of other users' queues.

The host guard compares the age of its jobs with theirs: the youngest makes way, and it can only stop jobs.
"""

from collections.abc import Callable, Sequence

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.memory.host_guard import HostProgram
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import LeaseLedger

# Near the floor, RAM is read ten times a second; who else is there is read less often.
_READ_EVERY_S = 1.0


class ProgramsBeside:
    """`from_wall` turns the time of a lease into queue time."""

    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, from_wall: Callable[[float], float]) -> None:
        self._transitions = transitions
        self._leases = leases
        self._from_wall = from_wall
        self._read_at: float | None = None
        self._found: Sequence[HostProgram] = ()

    def read(self, now: float) -> Sequence[HostProgram]:
        """Return the programs and the RAM that they hold, as of at most a second ago. A program whose RAM is unknown is
        left out, as are all of them if the ledger cannot be read."""
        if self._read_at is None or not 0.0 <= now - self._read_at < _READ_EVERY_S:
            self._read_at, self._found = now, self._measure()
        return self._found

    def _measure(self) -> Sequence[HostProgram]:
        own = {live.attempt.lease_id for live in self._transitions.live.values()}
        try:
            others = [lease for lease in self._leases.read()[0] if lease.id not in own]
        except EnvironmentFault:
            return ()
        held_mb = self._leases.measure_holders(others) if others else {}
        return [
            HostProgram(since=self._from_wall(lease.since), held_mb=held_mb[lease.id])
            for lease in others
            if lease.id in held_mb
        ]
