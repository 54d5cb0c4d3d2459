"""Leases of first runs follow what is expected of them now. All run on one card of 24 GB, since time 100."""

from types import SimpleNamespace
from typing import cast

import pytest

from gpuyard.model.job import Usage
from gpuyard.model.lease import Lease, Need, Share, UnknownMemory
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.usage_curve import Newcomer
from gpuyard.queue.measure_usage import UsageTracker
from gpuyard.queue.own_leases import LeaseAdjuster
from gpuyard.queue.transitions import JobTransitions
from gpuyard.system.processes import this_process
from tests.unit.policy.test_placement import GB, card, machine
from tests.unit.store import QueueDb, attempt_of

SURENESS = 1.65
BEFORE = Share(device_id="G0", memory_mb=6 * GB, spread_mb=6 * GB, is_exclusive=False)


class FirstRuns:
    """Running first runs, and what each has been measured to hold."""

    def __init__(self, queue_db: QueueDb) -> None:
        self._queue_db = queue_db
        self.transitions = JobTransitions(queue_db.store)
        self._tracker = SimpleNamespace(last=None)
        self.adjuster = LeaseAdjuster(self.transitions, cast("UsageTracker", self._tracker))
        self.leases: list[Lease] = []
        self._usages: dict[int, tuple[float, float]] = {}

    def start(self, program: str, held_gb: float, grew_at_s: float = 1.0) -> int:
        command = ("python", program, f"--seed={len(self.leases)}")
        (job_id,) = self._queue_db.add(command=command, need=Need(memory=UnknownMemory()))
        attempt = attempt_of(job_id, 100.0, devices=("G0",), lease_id=f"L{job_id}", reserved_mb=6 * GB)  # fmt: skip
        self._queue_db.store.start_attempt(attempt)
        self.transitions.reload()
        self.leases.append(Lease(id=f"L{job_id}", holder=this_process(), shares=(BEFORE,), since=100.0))
        self._usages[job_id] = held_gb * GB, grew_at_s
        for each, (held_mb, grew_at) in self._usages.items():
            usage = Usage(peaks_mb={"G0": held_mb}, grew_at_s=grew_at) if held_mb else Usage()
            self.transitions.note_usage(each, usage)
        self._tracker.last = Sample(snapshot=machine(card(0)))
        return job_id

    def adjust(self, at: float) -> dict[int, Share]:
        """Return the shares of changed leases by job, and keep them."""
        changed = {}
        for wanted in list(self.adjuster.adjust(self.leases, at, SURENESS)):
            (share,) = wanted.claim.shares
            changed[int((wanted.amends or "")[1:])] = share
        self.leases = [
            Lease(id=each.id, holder=each.holder, shares=(changed.get(int(each.id[1:]), each.shares[0]),), since=100.0)
            for each in self.leases
        ]
        return changed


@pytest.fixture
def runs(queue_db: QueueDb) -> FirstRuns:
    return FirstRuns(queue_db)


def test_the_lease_of_a_flat_job_shrinks_to_what_it_may_still_need(runs: FirstRuns) -> None:
    job_id = runs.start("small.py", 1.0)
    assert runs.adjuster.has_adjustments(104.0, SURENESS)
    early = runs.adjust(104.0)[job_id]
    late = runs.adjust(140.0)[job_id]
    assert GB <= (late.memory_mb or 0.0) < (early.memory_mb or 0.0) < 6 * GB
    assert runs.transitions.live[job_id].attempt.reserved_mb == late.memory_mb
    assert not runs.adjuster.has_adjustments(140.0, SURENESS)
    assert runs.adjust(140.5) == {}


def test_a_running_job_shows_what_to_expect_of_others_of_its_program(runs: FirstRuns) -> None:
    shown = runs.start("small.py", 1.0)
    other = runs.start("small.py", 0.0)
    stranger = runs.start("other.py", 0.0)
    jobs = {job_id: runs.transitions.live[job_id].job for job_id in (shown, other, stranger)}
    means_mb, _ = runs.adjuster.running_like(jobs[other], 140.0)
    assert means_mb == pytest.approx((1.0 * GB,), rel=0.3)
    assert runs.adjuster.running_like(jobs[stranger], 140.0)[0] == ()
    changed = runs.adjust(140.0)
    assert (changed[other].memory_mb or 0.0) < 4 * GB, "it has shown nothing yet itself"
    assert stranger not in changed


def test_a_job_whose_memory_has_just_grown_shows_nothing(runs: FirstRuns) -> None:
    runs.start("small.py", 1.0, grew_at_s=39.5)
    other = runs.start("small.py", 0.0)
    assert runs.adjuster.running_like(runs.transitions.live[other].job, 140.0)[0] == ()


def test_what_a_job_shows_does_not_count_twice_for_itself(runs: FirstRuns) -> None:
    job_id = runs.start("small.py", 1.0)
    live = runs.transitions.live[job_id]
    alone = Newcomer(live.attempt, runs.transitions.estimates.known_runs(live.job), 104.0)
    (share,) = alone.adjusted_shares((BEFORE,), {"G0": 24 * GB}, SURENESS)
    assert runs.adjust(104.0)[job_id] == share


def test_when_a_sample_will_say_more_is_known(runs: FirstRuns) -> None:
    flat, unused = runs.start("small.py", 1.0), runs.start("other.py", 0.0)
    runs.adjust(104.0)
    due = runs.adjuster.evidence_due()
    assert due[flat] == pytest.approx(105.0), "flat since 101, and the next step after 3 s is 4 s"
    assert due[unused] == float("inf")
