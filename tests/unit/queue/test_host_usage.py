"""RAM of the queue's jobs: what placement sees, and what their leases tell other users."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.config import HostConfig
from gpuyard.model.job import Attempt, Started, Usage
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host, Sample, Snapshot
from gpuyard.policy.host_room import HostLimits, HostUse
from gpuyard.policy.queue_order import Lane, LaneQueue
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.running_jobs import HostUsage
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb

ME = Holder(uid=1, user="me", pid=7)
BEN = Holder(uid=2, user="ben", pid=8)
GB = 1024.0
RULES = Rules(limits=SchedulingLimits(cpu_jobs=1), host=HostConfig(keep_free="1G"))
STARTED = 100.0


class Meter:
    """The part of the ledger that measures: each call, and whether processes were read again."""

    def __init__(self, **used: HostUse) -> None:
        self.used = used
        self.calls: list[bool] = []

    def measure_host(self, leases: Sequence[Lease], *, again: bool) -> Mapping[str, HostUse]:
        self.calls.append(again)
        return {lease.id: self.used[lease.id] for lease in leases if lease.id in self.used}


@pytest.fixture
def transitions(queue_db: QueueDb) -> JobTransitions:
    transitions = JobTransitions(queue_db.store)
    (job_id,) = queue_db.add()
    phase = Started(at=STARTED, keeper_pid=9)
    attempt = Attempt(job_id=job_id, number=1, phase=phase, boot_id="b", lease_id="mine", usage=Usage(cpus_used=1.5))
    transitions.start(queue_db.job(job_id), attempt)
    return transitions


def lease(share: HostShare, name: str = "mine", holder: Holder = ME) -> Lease:
    return Lease(id=name, holder=holder, shares=(), since=0.0, host=share)


def sample(ram_mb: float) -> Sample:
    return Sample(snapshot=Snapshot(taken_at=1.0, host=Host()), ram_mb={(1, 1): ram_mb})


def usage(transitions: JobTransitions, meter: Any = None) -> HostUsage:
    ledger: Any = meter or Meter()
    return HostUsage(transitions, ledger)


def published(transitions: JobTransitions, share: HostShare, ram_mb: float, ran_s: float = 1.0) -> HostShare | None:
    wanted = list(usage(transitions).publish([lease(share)], sample(ram_mb), STARTED + ran_s))
    assert all(each.amends == "mine" for each in wanted)
    return wanted[0].claim.host if wanted else None


def test_our_jobs_count_with_the_sample_and_others_as_they_were_measured(transitions: JobTransitions) -> None:
    leases = [lease(HostShare(ram_mb=8 * GB)), lease(HostShare(ram_mb=GB), "script", BEN)]
    view = usage(transitions, Meter(script=HostUse(ram_mb=5.0))).view(leases, sample(700.0), RULES)
    assert view.limits == HostLimits(keep_free_mb=GB)
    assert view.used == {"mine": HostUse(ram_mb=700.0, cpus=1.5), "script": HostUse(ram_mb=5.0)}


def test_processes_are_read_once_for_each_sample(transitions: JobTransitions) -> None:
    meter = Meter()
    found, one = usage(transitions, meter), sample(1.0)
    for each in (one, one, sample(2.0)):
        found.view([lease(HostShare(ram_mb=GB))], each, RULES)
    found.view([replace(lease(HostShare(ram_mb=GB)), host=None)], sample(3.0), RULES)
    assert meter.calls == [True, False, True], "where no lease reserves RAM, nothing is read"


def test_a_lease_says_what_its_job_uses(transitions: JobTransitions) -> None:
    declared = HostShare(ram_mb=8 * GB, used_mb=0.0, used_cpus=1.5)
    assert published(transitions, declared, 100.0) is None
    assert published(transitions, declared, 3000.0) == replace(declared, used_mb=3000.0)
    expected = HostShare(ram_mb=4 * GB, is_ram_expected=True, used_mb=0.0, used_cpus=1.5)
    assert published(transitions, expected, 100.0) is None
    later = published(transitions, expected, 100.0, ran_s=60.0)
    assert later == replace(expected, ram_mb=125.0, used_mb=100.0)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_judged_before_is_judged_as_if_it_was_new(transitions: JobTransitions, seed: int) -> None:
    random = Random(seed)
    remembering, share, now = usage(transitions), HostShare(ram_mb=GB, is_ram_expected=True), STARTED
    for _ in range(40):
        now += random.choice([0.0, 1.0, 9.0])
        transitions.note_usage(1, Usage(cpus_used=random.choice([None, 1.5, 2.5])))
        share = random.choice([share, share, replace(share, ram_mb=2 * GB), replace(share, used_mb=100.0)])
        reading = sample(random.choice([0.0, 100.0, 100.0, 600.0]))
        changes = list(remembering.publish([lease(share)], reading, now))
        assert changes == list(usage(transitions).publish([lease(share)], reading, now))
        share = (changes[0].claim.host if changes else None) or share


def test_lanes_without_declared_ram_size_each_job_if_that_may_reserve_some(transitions: JobTransitions) -> None:
    def sizes(need: Need) -> bool:
        lane = Lane(id=1, priority=0, user="me", tag="", need=need)
        return usage(transitions).sized([LaneQueue(lane=lane, jobs=iter(()))])[0].lane.sizes_each

    assert sizes(Need(devices=1))
    assert not sizes(Need(devices=1, host=HostShare(ram_mb=GB)))
    assert not sizes(Need(devices=0)), "no job without devices has ever used much"
    transitions.store.set_setting("host-use-learned", "1")
    assert sizes(Need(devices=0))


def test_a_claim_without_a_share_of_the_host_leaves_it_as_it_is() -> None:
    assert Claim(shares=()).takes_lease is False
    assert Claim(shares=(), host=HostShare(ram_mb=GB)).takes_lease
