"""Whether a job waits only because free memory is promised to others. A card has 24 GB."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.lease import Lease, Need, WholeDevice
from gpuyard.model.machine_snapshot import Device
from gpuyard.policy.machine import Packing, would_have_run_out
from gpuyard.policy.plan import decide
from tests.unit.policy.test_placement import GB, card, lease, machine, shared
from tests.unit.policy.test_planner import CPU, queue, running, view, waiting_job


def is_avoided(
    need: Need, cards: Sequence[Device], *leases: Lease, packing: Packing | None = None, **changes: Any
) -> bool:
    """Return the result for a job that waits on this machine."""
    on = machine(*cards)
    seen = view(queue(1, need), on=on, leases=leases, **changes)
    plan = decide(replace(seen, machine=replace(seen.machine, packing=packing or Packing())))
    assert not plan.starts
    job = waiting_job(plan, 1)
    return would_have_run_out(job.need, job.reasons, on)


def test_reserved_memory_that_is_not_used_yet_would_have_been_given_away() -> None:
    assert is_avoided(shared(12 * GB), [card(0)], lease("a", "G0", memory_mb=16 * GB))


def test_a_card_that_is_all_reserved_needs_no_words() -> None:
    held = [replace(running(7), lease_id="a"), replace(running(8), lease_id="b")]
    leases = [lease(name, "G0", memory_mb=12 * GB) for name in "ab"]
    assert is_avoided(shared(12 * GB), [card(0)], *leases, running=held)
    assert not is_avoided(shared(12 * GB), [card(0, used=20 * GB)], *leases, running=held)


def test_a_card_with_an_exclusive_lease_is_reserved_as_a_whole() -> None:
    assert is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"))


def test_memory_that_is_in_use_would_not_have_been_given_away() -> None:
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)], lease("a", "G0", memory_mb=16 * GB))
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)])


def test_unknown_memory_is_not_free() -> None:
    assert not is_avoided(shared(12 * GB), [card(0, used=None)], lease("a", "G0", memory_mb=16 * GB))


@pytest.mark.parametrize("need", [Need(), Need(memory=WholeDevice(4 * GB))])
def test_a_job_that_waits_for_a_whole_card_does_not_wait_for_memory(need: Need) -> None:
    assert not is_avoided(need, [card(0)], lease("a", "G0", memory_mb=16 * GB))


def test_a_job_with_another_reason_does_not_wait_for_memory() -> None:
    full = Packing(max_jobs_per_device=1)
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0", memory_mb=GB), packing=full)
    assert not is_avoided(CPU, [card(0)], cpu_jobs=0)
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"), tags={"": 0})


def test_a_full_card_does_not_count_for_a_card_at_its_job_limit() -> None:
    cards = [card(0, used=23 * GB), card(1)]
    leases = [lease("a", "G0", memory_mb=23 * GB), lease("b", "G1", memory_mb=GB)]
    assert not is_avoided(shared(4 * GB), cards, *leases, packing=Packing(max_jobs_per_device=1))


def test_a_job_that_needs_two_cards_would_have_got_both() -> None:
    wide, reserved = shared(12 * GB, devices=2), lease("a", "G0", memory_mb=16 * GB)
    assert is_avoided(wide, [card(0), card(1)], reserved)
    assert not is_avoided(wide, [card(0), card(1, used=16 * GB)], reserved)
    assert not is_avoided(wide, [card(0), card(1, fault="gone")], reserved)
    assert not is_avoided(replace(wide, banned=("G1",)), [card(0), card(1)], reserved)


def test_a_card_that_it_may_not_have_does_not_count() -> None:
    reserved = [lease(name, f"G{at}", memory_mb=16 * GB) for at, name in enumerate("ab")]
    cards = [card(0, used=16 * GB), card(1)]
    assert is_avoided(shared(12 * GB), cards, *reserved)
    assert not is_avoided(replace(shared(12 * GB), only=("G0",)), cards, *reserved)
    assert not is_avoided(shared(12 * GB), [cards[0], replace(cards[1], fault="gone")], *reserved)
