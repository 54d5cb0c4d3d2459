"""Programs beside the jobs of a queue: who they are, and how often they are read."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.model.lease import Lease
from gpuyard.policy.memory_guards import HostProgram
from gpuyard.ports import LeaseLedger
from gpuyard.queue.guard_memory import ProgramsBeside
from gpuyard.queue.transitions import JobTransitions
from gpuyard.system.processes import this_process
from tests.unit.store import QueueDb, attempt_of


class Measured:
    """The part of the ledger that is read: the lease `unknown` cannot be measured, and others hold 700 MB."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.reads = 0
        self.error: EnvironmentFault | None = None

    def read(self) -> tuple[tuple[Lease, ...], tuple[Any, ...]]:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return tuple(Lease(id=name, holder=this_process(), shares=(), since=1050.0) for name in self.names), ()

    def measure_holders(self, leases: Sequence[Lease]) -> dict[str, float]:
        return {lease.id: 700.0 for lease in leases if lease.id != "unknown"}


@pytest.fixture
def transitions(queue_db: QueueDb) -> JobTransitions:
    transitions = JobTransitions(queue_db.store)
    (job_id,) = queue_db.add()
    attempt = attempt_of(job_id, 100.0, lease_id="mine")
    with queue_db.store.transaction():
        transitions.start(queue_db.job(job_id), attempt)
    return transitions


def beside(transitions: JobTransitions, ledger: Measured) -> ProgramsBeside:
    return ProgramsBeside(transitions, cast("LeaseLedger", ledger), lambda wall: wall - 1000.0)


def test_leases_of_others_count_in_queue_time_once_a_second_if_they_can_be_read(transitions: JobTransitions) -> None:
    found = beside(transitions, Measured("mine", "script", "unknown")).read(200.0)
    assert found == [HostProgram(since=50.0, held_mb=700.0)]
    ledger = Measured("script")
    programs = beside(transitions, ledger)
    for now in (200.0, 200.1, 200.9, 201.1):
        programs.read(now)
    assert ledger.reads == 2
    ledger = Measured("script")
    ledger.error = EnvironmentFault("no ledger")
    assert beside(transitions, ledger).read(200.0) == ()
