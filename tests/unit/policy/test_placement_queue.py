"""Requests in the ledger's queue: their order, what is reserved for them, and which requests they do not delay."""

import msgspec
import pytest

from gpuyard.model.lease import Need, WholeDevice
from gpuyard.model.machine_snapshot import Host
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import PATIENCE_S
from gpuyard.policy.placement import choose, in_queue_order
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_placement import BOB, GB, card, devices_of, kinds_of, lease, on_cards, shared, ticket


def test_requests_ahead_are_placed_first() -> None:
    # Tickets are ordered by priority then by time.
    late, early = ticket(Need(), since=2.0, name="late"), ticket(Need(), since=1.0, name="early")
    urgent = ticket(Need(), since=3.0, name="urgent", priority=5)
    assert [each.id for each in in_queue_order([late, early, urgent])] == ["urgent", "early", "late"]
    view = on_cards(card(0), now=1.0, ahead=(ticket(Need()),))
    choice = choose(Need(), view)
    assert choice.claim is None
    assert choice.reasons[0].text == "reserved for bob, pid 202, ahead in the queue"
    assert devices_of(choose(Need(), on_cards(card(0), card(1), now=1.0, ahead=(ticket(Need()),)))) == ("G1",)
    # A need of two cards is not starved by needs of one.
    view = on_cards(card(0), card(1), now=1.0, leases=(lease("a", "G0"),), ahead=(ticket(Need(devices=2)),))
    assert kinds_of(choose(Need(), view))["G1"] is ReasonKind.AWAITED
    assert kinds_of(choose(shared(1), view))["G1"] is ReasonKind.AWAITED


def busy_with_small_work(now: float, need: Need, **bounds: float) -> Machine:
    """Two leases of 4 GB have allocated all of it, and keep the card busy."""
    leases = (lease("a", "G0", memory_mb=4 * GB), lease("b", "G0", memory_mb=4 * GB))
    return on_cards(
        card(0, used=8 * GB, utilization_percent=100.0, power_draw_w=300.0),
        now=now,
        leases=leases,
        measured={("a", "G0"): 4 * GB, ("b", "G0"): 4 * GB},
        ahead=(ticket(msgspec.structs.replace(need, **bounds)),),
    )


@pytest.mark.parametrize(
    ("need", "bounds"),
    [
        (shared(20 * GB), {}),
        (Need(memory=WholeDevice(20 * GB)), {"max_utilization_percent": 1.0, "max_power_w": 80.0}),
        (Need(), {"max_memory_used_mb": 100.0}),
    ],
)
def test_a_large_need_that_waited_long_is_not_starved_by_small_ones(need: Need, bounds: dict[str, float]) -> None:
    soon, late = PATIENCE_S - 1, PATIENCE_S + 1
    assert devices_of(choose(shared(4 * GB), busy_with_small_work(soon, need, **bounds))) == ("G0",)
    held_back = choose(shared(4 * GB), busy_with_small_work(late, need, **bounds))
    assert held_back.claim is None
    assert held_back.reasons[0].holders[-1] == BOB


@pytest.mark.parametrize("now", [1.0, PATIENCE_S + 1])
@pytest.mark.parametrize(
    "need",
    [
        pytest.param(Need(memory=WholeDevice(20 * GB), only=("G0",)), id="on a card that a foreign process fills"),
        pytest.param(Need(memory=WholeDevice(20 * GB), devices=2), id="on two cards, one filled by a foreign process"),
        pytest.param(shared(20 * GB, devices=2), id="sharing two cards, one filled by a foreign process"),
        pytest.param(Need(devices=3), id="on more cards than there are"),
        pytest.param(Need(max_cpu_percent=50.0), id="on a quieter machine"),
    ],
)
def test_a_need_ahead_that_a_foreign_process_blocks_reserves_nothing(need: Need, now: float) -> None:
    host = Host(cpu_percent=95.0)
    view = on_cards(card(0, used=20 * GB), card(1), host=host, now=now, ahead=(ticket(need),))
    assert devices_of(choose(Need(), view)) == ("G1",)


def test_a_foreign_process_beside_leases_does_not_delay_other_requests() -> None:
    """When the lease ends 16 GB are free, and 20 are needed: no other request waits for that."""
    leases, ahead = (lease("a", "G0", memory_mb=4 * GB),), (ticket(shared(20 * GB)),)
    measured = {("a", "G0"): 4 * GB}
    view = on_cards(card(0, used=12 * GB), now=PATIENCE_S + 1, leases=leases, measured=measured, ahead=ahead)
    assert devices_of(choose(shared(4 * GB), view)) == ("G0",)
