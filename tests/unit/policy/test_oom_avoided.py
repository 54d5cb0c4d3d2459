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


def test_memory_that_is_promised_and_not_used_would_have_been_given_away() -> None:
    # Reserved memory that is not used yet would have been given away.
    assert is_avoided(shared(12 * GB), [card(0)], lease("a", "G0", memory_mb=16 * GB))
    # A card with an exclusive lease is reserved as a whole.
    assert is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"))
    held = [replace(running(7), lease_id="a"), replace(running(8), lease_id="b")]
    leases = [lease(name, "G0", memory_mb=12 * GB) for name in "ab"]
    assert is_avoided(shared(12 * GB), [card(0)], *leases, running=held), "a card that is all reserved needs no words"
    assert not is_avoided(shared(12 * GB), [card(0, used=20 * GB)], *leases, running=held)


def test_memory_that_is_used_or_unknown_would_not() -> None:
    # Memory that is in use would not have been given away.
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)], lease("a", "G0", memory_mb=16 * GB))
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)])
    # Unknown memory is not free.
    assert not is_avoided(shared(12 * GB), [card(0, used=None)], lease("a", "G0", memory_mb=16 * GB))
    full = Packing(max_jobs_per_device=1)
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0", memory_mb=GB), packing=full)
    assert not is_avoided(CPU, [card(0)], cpu_jobs=0), "a job with another reason does not wait for memory"
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"), tags={"": 0})
    # A full card does not count for a card at its job limit.
    cards = [card(0, used=23 * GB), card(1)]
    leases = [lease("a", "G0", memory_mb=23 * GB), lease("b", "G1", memory_mb=GB)]
    assert not is_avoided(shared(4 * GB), cards, *leases, packing=Packing(max_jobs_per_device=1))


@pytest.mark.parametrize("need", [Need(), Need(memory=WholeDevice(4 * GB))])
def test_a_job_that_waits_for_a_whole_card_does_not_wait_for_memory(need: Need) -> None:
    assert not is_avoided(need, [card(0)], lease("a", "G0", memory_mb=16 * GB))


def test_only_cards_that_the_job_may_have_count() -> None:
    wide, reserved = shared(12 * GB, devices=2), lease("a", "G0", memory_mb=16 * GB)
    assert is_avoided(wide, [card(0), card(1)], reserved), "a job that needs two cards would have got both"
    assert not is_avoided(wide, [card(0), card(1, used=16 * GB)], reserved)
    assert not is_avoided(wide, [card(0), card(1, fault="gone")], reserved)
    assert not is_avoided(replace(wide, banned=("G1",)), [card(0), card(1)], reserved)
    both = [lease(name, f"G{at}", memory_mb=16 * GB) for at, name in enumerate("ab")]
    cards = [card(0, used=16 * GB), card(1)]
    assert is_avoided(shared(12 * GB), cards, *both), "a card that it may not have does not count"
    assert not is_avoided(replace(shared(12 * GB), only=("G0",)), cards, *both)
    assert not is_avoided(shared(12 * GB), [cards[0], replace(cards[1], fault="gone")], *both)
