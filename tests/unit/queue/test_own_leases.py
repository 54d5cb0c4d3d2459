"""Running attempts keep their shares, also if their leases are gone from the ledger."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lease import Holder, HostShare, Lease, Share
from gpuyard.queue.own_leases import OwnLeases
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb, attempt_of

ME = Holder(uid=1, user="me", pid=7)
OTHER = Lease(id="other", holder=Holder(uid=2, user="ben", pid=8), shares=(Share(device_id="G1"),), since=0.0)


class Held(NamedTuple):
    lease: Lease
    calls: list[str]

    @property
    def descriptor(self) -> int:
        return 5

    def leave(self) -> None:
        self.calls.append("leave")

    def release(self) -> None:
        self.calls.append("release")


@pytest.fixture
def transitions(queue_db: QueueDb) -> JobTransitions:
    transitions = JobTransitions(queue_db.store)
    (job_id,) = queue_db.add()
    transitions.start(queue_db.job(job_id), attempt_of(job_id, 1.0, devices=("G0",), lease_id="mine"))
    return transitions


def lease(*shares: Share) -> Lease:
    return Lease(id="mine", holder=ME, shares=shares or (Share(device_id="G0"),), since=0.0)


def test_a_missing_lease_counts_with_what_it_had_last(transitions: JobTransitions) -> None:
    own = OwnLeases(transitions, ME)
    settled = lease(Share(device_id="G0", memory_mb=500.0, is_exclusive=False))
    assert own.complete([settled, OTHER]) == (settled, OTHER)
    *others, missing = own.complete([OTHER])
    assert (others, missing.id, missing.shares) == ([OTHER], "mine", settled.shares)
    (missing,) = OwnLeases(transitions, ME).complete([])
    assert missing.shares == (Share(device_id="G0"),), "the whole device"
    assert missing.holder.label == "job 1"


def test_a_missing_lease_keeps_its_ram(transitions: JobTransitions) -> None:
    own = OwnLeases(transitions, ME)
    settled = replace(lease(), host=HostShare(ram_mb=500.0))
    own.complete([settled])
    (missing,) = own.complete([])
    assert missing.host == HostShare(ram_mb=500.0)
    (wanted,) = own.wanted([], 1e9)
    assert wanted.claim.host == HostShare(ram_mb=500.0)


def test_a_lease_is_made_again_when_it_stays_missing_or_by_a_new_daemon(transitions: JobTransitions) -> None:
    own = OwnLeases(transitions, ME)
    own.complete([lease()])
    assert own.wanted([lease()], 100.0) == []
    own.complete([])
    assert own.wanted([], 100.5) == [], "its program may just have ended"
    (wanted,) = own.wanted([], 101.5)
    assert (wanted.remakes, wanted.claim.shares, wanted.label) == ("mine", (Share(device_id="G0"),), "job 1")
    own = OwnLeases(transitions, ME)
    own.complete([])
    assert [each.remakes for each in own.wanted([], 100.0)] == ["mine"]


def test_what_was_made_again_is_held_until_the_attempt_ends(transitions: JobTransitions) -> None:
    own = OwnLeases(transitions, ME)
    own.wanted([lease()], 98.0)
    own.complete([])
    own.wanted([], 99.0)
    own.wanted([], 100.0)
    made, new = Held(lease(), []), Held(OTHER, [])
    assert list(own.keep([made, new])) == [new]
    assert own.notice is not None
    own.release_ended()
    assert made.calls == []
    again = Held(lease(), [])
    own.complete([])
    own.wanted([], 105.0)
    own.wanted([], 107.0)
    assert list(own.keep([again])) == []
    assert made.calls == ["leave"], "the file that was removed a second time"
    transitions.end(1, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 120.0)
    own.release_ended()
    own.release_ended()
    assert again.calls == ["release"]
    assert own.complete([]) == ()


def test_the_ledger_is_read_once_a_second_while_attempts_hold_leases(transitions: JobTransitions) -> None:
    own = OwnLeases(transitions, ME)
    assert own.is_check_due(100.0)
    own.wanted([lease()], 100.0)
    assert not own.is_check_due(100.5)
    assert own.is_check_due(101.0)
    transitions.end(1, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 120.0)
    assert not own.is_check_due(200.0)
