"""The waiting work that decides how devices are shared."""

import pytest

from gpuyard.control.sharing_facts import SharingFacts
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.lease import FixedMemory, Need
from gpuyard.core.scheduling.device_fit import Packing
from tests.unit.store import QueueDb

ON_A_GPU = Need(memory=FixedMemory(1024.0))


@pytest.fixture
def facts(queue_db: QueueDb) -> SharingFacts:
    return SharingFacts(JobTransitions(queue_db.store))


def waiting_s(facts: SharingFacts, queue_db: QueueDb, at: float) -> float | None:
    """Return the waiting work as a step on two devices sees it."""
    facts.packing(Packing(min_gain_percent=5.0), queue_db.store.ready_queues(), 2)
    return facts.waiting_s(at)


def test_a_job_that_has_started_no_longer_waits(facts: SharingFacts, queue_db: QueueDb) -> None:
    """Waiting jobs are examined every ten seconds. Jobs that start in between were counted twice."""
    jobs = queue_db.add(8, need=ON_A_GPU, duration_s=100.0)
    assert waiting_s(facts, queue_db, 1.0) == 800.0
    for job_id in jobs[:6]:
        queue_db.run(job_id)
    assert waiting_s(facts, queue_db, 2.0) == 200.0
    assert waiting_s(facts, queue_db, 12.0) == 200.0


def test_a_job_that_was_submitted_since_counts_like_the_others(facts: SharingFacts, queue_db: QueueDb) -> None:
    queue_db.add(2, need=ON_A_GPU, duration_s=100.0)
    assert waiting_s(facts, queue_db, 1.0) == 200.0
    queue_db.add(need=ON_A_GPU, duration_s=100.0)
    assert waiting_s(facts, queue_db, 2.0) == 300.0


def test_without_a_duration_of_each_job_it_is_unknown(facts: SharingFacts, queue_db: QueueDb) -> None:
    queue_db.add(need=ON_A_GPU, duration_s=100.0)
    queue_db.add(need=ON_A_GPU)
    assert waiting_s(facts, queue_db, 1.0) is None
