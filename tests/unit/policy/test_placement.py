"""Placement on devices. Figures are in MB; a card has 24 GB by default."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import FixedMemory, Holder, Lease, Need, Share, Ticket, WholeDevice
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import PATIENCE_S
from gpuyard.policy.placement import PlacementChoice, PlacementState, choose, in_queue_order
from gpuyard.policy.wait_reasons import ReasonKind

GB = 1024.0
CARD = 24 * GB
ALICE = Holder(uid=1000, user="alice", pid=101, label="train")
BOB = Holder(uid=1001, user="bob", pid=202)


def card(index: int, used: float | None = 0.0, **changes: Any) -> Device:
    """Return a card on which one process holds all used memory."""
    free = None if used is None else CARD - used
    device = Device(
        id=f"G{index}", vendor=Vendor.NVIDIA, index=index, memory_total_mb=CARD, memory_used_mb=used,
        memory_free_mb=free, utilization_percent=0.0, power_draw_w=20.0,
        processes=(Process(pid=7, memory_mb=used),) if used else (),
    )  # fmt: skip
    return msgspec.structs.replace(device, **changes)


def machine(*devices: Device, host: Host | None = None) -> Snapshot:
    return Snapshot(taken_at=0.0, host=host or Host(), devices=devices)


def on_cards(*devices: Device, host: Host | None = None, now: float = 0.0, **known: Any) -> Machine:
    return Machine(now=now, snapshot=machine(*devices, host=host), **known)


def shared(memory_mb: float, devices: int = 1) -> Need:
    return Need(devices=devices, memory=FixedMemory(memory_mb))


def lease(name: str, *ids: str, memory_mb: float | None = None, holder: Holder = ALICE) -> Lease:
    """Return a lease that is shared if it has `memory_mb`, else exclusive."""
    exclusive = memory_mb is None
    shares = tuple(Share(device_id=each, memory_mb=memory_mb, is_exclusive=exclusive) for each in ids)
    return Lease(id=name, holder=holder, shares=shares, since=0.0)


def ticket(need: Need, since: float = 0.0, name: str = "t", priority: int = 0) -> Ticket:
    return Ticket(id=name, holder=BOB, need=need, since=since, priority=priority)


def devices_of(choice: PlacementChoice) -> tuple[str, ...]:
    return tuple(share.device_id for share in choice.claim.shares) if choice.claim else ()


def kinds_of(choice: PlacementChoice) -> dict[str | None, ReasonKind]:
    return {reason.device_id: reason.kind for reason in choice.reasons}


def free_memory(device: Device, view: Machine) -> float | None:
    return PlacementState(view).states[device.id].free_mb


def placement_without(placement: PlacementState, lease_ids: frozenset[str]) -> PlacementState:
    """Return the placement after these leases have ended."""
    after = PlacementState(placement.machine)
    after.states = {device_id: state.without(lease_ids) for device_id, state in placement.states.items()}
    return after


def test_a_lease_is_charged_its_reservation_or_its_use() -> None:
    view = on_cards(card(0), leases=(lease("a", "G0", memory_mb=20 * GB),), measured={})
    starting = msgspec.structs.replace(view, measured={("a", "G0"): 0.0})
    for each in (view, starting):
        assert free_memory(card(0), each) == 4 * GB
        assert choose(shared(5 * GB), each).claim is None
        assert devices_of(choose(shared(4 * GB), each)) == ("G0",)
    seen = card(0, used=10 * GB)
    view = on_cards(seen, leases=(lease("a", "G0", memory_mb=4 * GB),), measured={("a", "G0"): 10 * GB})
    assert free_memory(seen, view) == 14 * GB, "a lease that grew is charged its use"


def test_foreign_memory_is_charged_beside_the_leases() -> None:
    seen = card(0, used=9 * GB)
    view = on_cards(seen, leases=(lease("a", "G0", memory_mb=8 * GB),), measured={("a", "G0"): 3 * GB})
    assert free_memory(seen, view) == CARD - 6 * GB - 8 * GB
    # Where processes are hidden use counts against the reservations first.
    leases = (lease("a", "G0", memory_mb=8 * GB),)
    hidden = {("a", "G0"): None}
    for used, free in ((0.0, 16 * GB), (6 * GB, 16 * GB), (8 * GB, 16 * GB), (11 * GB, 13 * GB)):
        seen = card(0, used=used)
        assert free_memory(seen, on_cards(seen, leases=leases, measured=hidden)) == free
    # Foreign memory is seen beside a measured lease.
    device = card(0, used=12 * GB)
    view = on_cards(
        device,
        leases=(lease("seen", "G0", memory_mb=8 * GB), lease("hidden", "G0", memory_mb=4 * GB)),
        measured={("seen", "G0"): 0.0, ("hidden", "G0"): None},
    )
    assert free_memory(device, view) == CARD - 8 * GB - 8 * GB - 4 * GB
    # Memory that the driver keeps is not free.
    seen = card(0, used=1 * GB, memory_free_mb=22 * GB)
    assert free_memory(seen, on_cards(seen)) == 22 * GB
    assert choose(shared(22.5 * GB), on_cards(seen)).claim is None


# Properties over any order of events.

needs = st.builds(
    Need,
    devices=st.integers(1, 3),
    memory=st.builds(
        lambda kind, size: kind(size * GB), st.sampled_from([FixedMemory, WholeDevice]), st.integers(1, 24)
    ),
)


class World:
    """Three empty cards, and the leases that were granted on them."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []

    def view(self) -> Machine:
        measured = {(each.id, share.device_id): 0.0 for each in self.leases for share in each.shares}
        return on_cards(*map(card, range(3)), leases=tuple(self.leases), measured=measured)

    def ask(self, need: Need) -> bool:
        claim = choose(need, self.view()).claim
        if claim is not None:
            self.leases.append(Lease(id=f"l{len(self.leases)}", holder=ALICE, shares=claim.shares, since=0.0))
        return claim is not None


@given(st.lists(needs, min_size=1, max_size=6), needs)
def test_a_request_never_takes_what_requests_ahead_could_get_now(ahead: list[Need], mine: Need) -> None:
    """Granted in queue order, each request gets the same with and without the request behind."""
    world = World()
    line = tuple(ticket(need, since=place, name=str(place)) for place, need in enumerate(ahead))
    claim = choose(mine, msgspec.structs.replace(world.view(), ahead=line)).claim
    served = [world.ask(need) for need in ahead]
    jumped = World()
    if claim is not None:
        jumped.leases.append(Lease(id="mine", holder=BOB, shares=claim.shares, since=0.0))
    after = [jumped.ask(need) for need in ahead]
    first_unserved = served.index(False) if False in served else len(served)
    assert after[:first_unserved] == served[:first_unserved]


def test_unknown_memory_keeps_an_exclusive_need_from_nothing_and_a_shared_one_from_sharing() -> None:
    blind = card(0, used=None, memory_total_mb=None, utilization_percent=None, power_draw_w=None, processes=None)
    view = on_cards(blind)
    bounded = Need(memory=WholeDevice(20 * GB), max_utilization_percent=1, max_power_w=80, max_memory_used_mb=10)
    assert devices_of(choose(bounded, view)) == ("G0",)
    assert devices_of(choose(Need(), view)) == ("G0",)
    assert "unknown" in choose(shared(1), view).reasons[0].text
    blind = card(0, used=None, processes=None)
    view = on_cards(blind, leases=(lease("a", "G0", memory_mb=20 * GB),))
    assert free_memory(blind, view) == 4 * GB, "used memory that is unknown leaves the total less the reservations"


def test_banned_unrequested_and_unhealthy_cards_are_skipped_with_different_reasons() -> None:
    devices = machine(card(0), card(1), card(2, fault="fell off the bus"), card(3))
    choice = choose(Need(devices=2, only=("G0", "G2", "G3"), banned=("G0",)), Machine(now=0.0, snapshot=devices))
    assert kinds_of(choice) == {
        "G0": ReasonKind.CLOSED,
        "G1": ReasonKind.NOT_ASKED_FOR,
        "G2": ReasonKind.UNHEALTHY,
        None: ReasonKind.TOO_FEW,
    }
    assert "fell off the bus" in choice.reasons[2].text
    assert choice.reasons[-1].text == "1 GPU available now (2 needed)"


def test_parts_and_whole_cards_exclude_each_other() -> None:
    part = card(1, parent="G0")
    view = on_cards(card(0), part)
    assert devices_of(choose(Need(), view)) == ("G1",)
    assert choose(Need(devices=2), view).claim is None, "a split card is used through its parts only"
    # A whole card is not granted while a part of it is leased.
    view = on_cards(card(0), leases=(lease("a", "G0", memory_mb=GB),))
    for need in (Need(), Need(memory=WholeDevice(GB))):
        choice = choose(need, view)
        assert (choice.claim, kinds_of(choice)["G0"]) == (None, ReasonKind.LEASED)


def test_without_health_checks_leases_still_count() -> None:
    sick = machine(card(0, fault="lost"), card(1, used=20 * GB, utilization_percent=99.0))
    careless = Need(ignores_health=True, devices=2, max_utilization_percent=1)
    assert devices_of(choose(careless, Machine(now=0.0, snapshot=sick))) == ("G0", "G1")
    taken = Machine(now=0.0, snapshot=sick, leases=(lease("a", "G1"),))
    assert kinds_of(choose(careless, taken))["G1"] is ReasonKind.LEASED
    # Without health checks shared leases still fit the card.
    view = on_cards(card(0), leases=(lease("a", "G0", memory_mb=20 * GB),))
    careless = msgspec.structs.replace(shared(8 * GB), ignores_health=True)
    assert kinds_of(choose(careless, view))["G0"] is ReasonKind.NO_ROOM


@pytest.mark.parametrize(
    ("need", "name", "met", "over", "kind", "words"),
    [
        (Need(max_utilization_percent=1), "utilization_percent", 1.0, 2.0, ReasonKind.TOO_BUSY, "GPU 2% > 1%"),
        (Need(max_power_w=80), "power_draw_w", 80.0, 250.0, ReasonKind.POWER_LIMIT, "power 250 W > 80 W"),
        (Need(max_memory_used_mb=400), "used", 400, 512, ReasonKind.TOO_FULL, "GPU memory 512 MB > 400 MB"),
        (Need(memory=WholeDevice(20 * GB)), "used", 4 * GB, 6 * GB, ReasonKind.NO_ROOM,
         "18 GB free, 20 GB needed: 6 GB used by processes outside gpuyard"),
    ],
)  # fmt: skip
def test_an_exceeded_limit_is_explained_and_one_that_is_just_met_is_no_reason(
    need: Need, name: str, met: float, over: float, *, kind: ReasonKind, words: str
) -> None:
    reason = choose(need, on_cards(card(0, **{name: over}))).reasons[0]
    assert (reason.kind, reason.device_id, reason.text) == (kind, "G0", words)
    assert devices_of(choose(need, on_cards(card(0, **{name: met})))) == ("G0",)


@pytest.mark.parametrize(
    ("device", "is_idle"),
    [
        (card(0, power_draw_w=118.0, processes=()), True),
        (card(0, power_draw_w=118.0, processes=None), True),
        (card(0, used=GB, power_draw_w=118.0, processes=()), True),
        (card(0, used=2 * GB, power_draw_w=118.0, processes=()), False),
        (card(0, power_draw_w=118.0, utilization_percent=1.0, processes=()), False),
        (card(0, power_draw_w=118.0, utilization_percent=None, processes=()), False),
        (card(0, power_draw_w=118.0, processes=(Process(pid=7, memory_mb=200.0),)), False),
    ],
)
def test_a_limit_of_power_that_ignores_idle_devices_holds_for_all_others(device: Device, is_idle: bool) -> None:
    view = on_cards(device)
    needs = [
        Need(memory=WholeDevice(20 * GB), max_power_w=80.0, ignores_idle_power=ignores) for ignores in (True, False)
    ]
    assert [choose(need, view).claim is not None for need in needs] == [is_idle, False]


def test_a_busy_or_full_machine_holds_up_all_devices() -> None:
    host = Host(cpu_percent=91.0, memory_available_mb=500.0)
    view = on_cards(card(0), host=host)
    choice = choose(Need(max_cpu_percent=80, min_host_memory_mb=1000), view)
    assert choice.claim is None
    assert [reason.text for reason in choice.reasons] == ["CPU 91% > 80%"]
    assert devices_of(choose(Need(max_cpu_percent=91, min_host_memory_mb=500), view)) == ("G0",)
    unread = on_cards(card(0))
    assert devices_of(choose(Need(max_cpu_percent=1, min_host_memory_mb=1e9), unread)) == ("G0",)


def test_a_tiny_foreign_process_does_not_block_a_card_and_a_big_one_does() -> None:
    def ask(device: Device) -> PlacementChoice:
        return choose(Need(), on_cards(device))

    notebook = (Process(pid=7, memory_mb=300.0),)
    assert devices_of(ask(card(0, used=300.0, processes=notebook))) == ("G0",)
    big = ask(card(0, used=9 * GB))
    assert (big.reasons[0].kind, big.reasons[0].had) == (ReasonKind.OCCUPIED, 9 * GB)
    assert "9 GB" in big.reasons[0].text


def test_the_card_with_the_least_sufficient_free_memory_is_chosen() -> None:
    devices = machine(card(0), card(1, used=12 * GB), card(2, used=20 * GB))
    assert devices_of(choose(shared(8 * GB), Machine(now=0.0, snapshot=devices))) == ("G1",)
    assert devices_of(choose(shared(2 * GB, devices=2), Machine(now=0.0, snapshot=devices))) == ("G1", "G2")


def test_the_reasons_name_the_device_the_figures_and_the_holders() -> None:
    view = on_cards(card(0), card(1), leases=(lease("a", "G0"), lease("b", "G1", memory_mb=20 * GB, holder=BOB)))
    by_device = {reason.device_id: reason for reason in choose(shared(8 * GB), view).reasons}
    assert (by_device["G0"].text, by_device["G0"].holders) == ("held by alice, pid 101 (train)", (ALICE,))
    assert by_device["G1"].text == "4 GB free, 8 GB needed: 20 GB kept for bob, pid 202"
    assert (by_device["G1"].had, by_device["G1"].needed) == (4 * GB, 8 * GB)


def test_a_claim_is_of_one_vendor() -> None:
    radeon = card(2, vendor=Vendor.AMD)
    two, three = Need(devices=2), Need(devices=3)
    view = on_cards(card(0), radeon, card(1))
    assert devices_of(choose(two, view)) == ("G0", "G1")
    assert devices_of(choose(three, view)) == ()
    full = Machine(now=0.0, snapshot=view.snapshot, leases=(lease("a", "G0"),))
    assert devices_of(choose(two, full)) == (), "devices of two vendors are never in one claim"
    # A ticket for another vendor s devices blocks none of these.
    radeon = card(2, vendor=Vendor.AMD)
    ahead = (ticket(Need(vendor=Vendor.NVIDIA)),)
    view = on_cards(card(0), radeon, now=1000.0, leases=(lease("a", "G0"),), ahead=ahead)
    assert devices_of(choose(Need(vendor=Vendor.AMD), view)) == ("G2",)
    text = next(each.text for each in choose(Need(vendor=Vendor.NVIDIA), view).reasons if each.device_id == "G2")
    assert text == "of another vendor: this job gets nvidia GPUs"


def test_requests_ahead_are_placed_first() -> None:
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
