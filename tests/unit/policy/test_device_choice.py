"""Jobs on several devices get the best-linked ones, and jobs on one break as few sets as possible. Cards have 24 GB."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Lease, Need
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.model.topology import Topology, merge
from gpuyard.policy.device_names import check_possible
from gpuyard.policy.linked_sets import broken, is_joined, score
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import PATIENCE_S
from gpuyard.policy.placement import PlacementState, choose
from gpuyard.policy.plan import decide
from gpuyard.policy.preempt import find_victims
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_linked_sets import EIGHT, groups, on_nodes, topologies
from tests.unit.policy.test_placement import GB, card, devices_of, kinds_of, lease, machine, shared, ticket
from tests.unit.policy.test_planner import queue, started, view
from tests.unit.policy.test_preemption import URGENT, held, job
from tests.unit.policy.test_preemption import ids as ids_of

PAIRS = groups("01", "23", "45", "67")


def linked_machine(topology: Topology, *cards: Device, count: int = 8) -> Snapshot:
    return replace(machine(*(cards or (card(index) for index in range(count)))), topology=topology)


def place(need: Need, topology: Topology, *busy: str, **changes: Any) -> tuple[str, ...]:
    """Return the devices that the need gets on eight cards, some of which are leased as a whole."""
    leases = (lease("busy", *busy),) if busy else ()
    return devices_of(choose(need, Machine(now=0.0, snapshot=linked_machine(topology), leases=leases, **changes)))


@given(topologies(), st.integers(1, 5), st.booleans(), st.data())
def test_a_claim_has_the_best_links_of_all_free_sets_and_breaks_the_least(
    drawn: tuple[Topology, list[str]], count: int, is_linked: bool, data: st.DataObject
) -> None:
    topology, devices = drawn
    busy = data.draw(st.sets(st.sampled_from(devices)))
    leases = tuple(lease(f"of {each}", each) for each in sorted(busy))
    cards = [card(index) for index in range(len(devices))]
    need = Need(devices=count, is_linked=is_linked and count > 1)
    found = choose(need, Machine(now=0.0, snapshot=linked_machine(topology, *cards), leases=leases))
    free = [each for each in devices if each not in busy]
    every = [each for each in combinations(free, count) if not need.is_linked or is_joined(topology, each)]
    assert (found.claim is None) == (not every)
    if every:
        chosen = devices_of(found)

        def rank(devices: tuple[str, ...]) -> tuple[int, int, int]:
            weakest, total = score(topology, devices)
            return -weakest, -total, broken(topology, devices, free)

        assert rank(chosen) == min(map(rank, every))


@given(topologies(), st.data())
def test_a_shared_job_breaks_no_more_than_it_has_to(drawn: tuple[Topology, list[str]], data: st.DataObject) -> None:
    topology, devices = drawn
    used = data.draw(st.sets(st.sampled_from(devices), max_size=len(devices) - 1))
    leases = tuple(lease(f"of {each}", each) for each in sorted(used))
    cards = [card(index) for index in range(len(devices))]
    found = choose(shared(4 * GB), Machine(now=0.0, snapshot=linked_machine(topology, *cards), leases=leases))
    free = [each for each in devices if each not in used]
    [chosen] = devices_of(found)
    assert broken(topology, (chosen,), free) == min(broken(topology, (each,), free) for each in free)


def test_several_devices_are_of_one_group() -> None:
    assert place(Need(devices=4), EIGHT, "G0") == ("G4", "G5", "G6", "G7")
    assert place(shared(GB, devices=2), PAIRS, "G0", "G2") == ("G4", "G5")


def test_one_device_is_taken_from_the_group_that_is_broken_already() -> None:
    assert place(Need(), EIGHT, "G6") == ("G4",)
    assert place(shared(GB), EIGHT, "G6") == ("G4",)
    assert place(Need(), merge(on_nodes("01234567"), PAIRS), "G4") == ("G5",)


def test_without_known_links_memory_alone_decides() -> None:
    cards = [card(0), card(1, used=4 * GB), card(2, used=2 * GB)]
    view = Machine(now=0.0, snapshot=machine(*cards))
    assert devices_of(choose(shared(GB, devices=2), view)) == ("G1", "G2")


def test_free_memory_decides_before_broken_sets_for_one_device() -> None:
    cards = [card(index, used=8 * GB if index == 0 else 0.0) for index in range(8)]
    view = Machine(now=0.0, snapshot=linked_machine(merge(EIGHT, groups("0123")), *cards), leases=())
    assert devices_of(choose(shared(GB), view)) == ("G0",)


def test_megabytes_that_a_driver_holds_do_not_decide_before_broken_sets() -> None:
    cards = [card(index, used=3.0 if index == 0 else 0.0) for index in range(8)]
    view = Machine(now=0.0, snapshot=linked_machine(EIGHT, *cards), leases=(lease("a", "G4"),))
    assert devices_of(choose(shared(GB), view)) == ("G5",)


def test_slow_down_decides_before_links() -> None:
    """The pair 0 and 1 is linked best, and another job keeps card 1 busy: the new job would slow it."""
    busy = Lease(id="a", holder=lease("a", "G1").holder, shares=(), since=0.0)
    shares = tuple(replace(share, load_percent=100.0) for share in lease("a", "G1", memory_mb=GB).shares)
    need = replace(shared(GB, devices=2), load_percent=100.0)
    snapshot = linked_machine(groups("01"), *(card(index) for index in range(4)))
    view = Machine(now=0.0, snapshot=snapshot, leases=(replace(busy, shares=shares),), loads={"G1": 100.0})
    assert "G1" not in devices_of(choose(need, view))


def test_a_linked_job_waits_for_a_linked_set_and_says_so() -> None:
    need = Need(devices=2, is_linked=True)
    snapshot = linked_machine(PAIRS, *(card(index) for index in range(4)))
    choice = choose(need, Machine(now=0.0, snapshot=snapshot, leases=(lease("a", "G0", "G2"),)))
    assert choice.claim is None
    assert kinds_of(choice)[None] is ReasonKind.NOT_LINKED
    [reason] = [each for each in choice.reasons if each.kind is ReasonKind.NOT_LINKED]
    assert reason.text == "2 GPUs available now, but not 2 that are joined by NVLink or XGMI"
    freed = Machine(now=0.0, snapshot=snapshot, leases=(lease("a", "G0"),))
    assert devices_of(choose(need, freed)) == ("G2", "G3")


def test_a_job_on_one_node_waits_for_one_and_says_which_are_free_there() -> None:
    need = Need(devices=3, is_on_one_node=True)
    choice = choose(need, Machine(now=0.0, snapshot=linked_machine(EIGHT), leases=(lease("a", *EIGHT.nodes),)))
    assert kinds_of(choice)[None] is ReasonKind.TOO_FEW
    leases = (lease("a", "G0", "G1", "G4", "G5"),)
    choice = choose(need, Machine(now=0.0, snapshot=linked_machine(EIGHT), leases=leases))
    [reason] = [each for each in choice.reasons if each.kind is ReasonKind.NOT_LINKED]
    assert reason.text == "4 GPUs available now, but not 3 that are on one NUMA node; only GPU 2, 3; GPU 6, 7"


def test_devices_of_another_vendor_do_not_complete_a_set() -> None:
    cards = [card(0), card(1, vendor=Vendor.AMD), card(2)]
    view = Machine(now=0.0, snapshot=linked_machine(groups("02"), *cards))
    assert devices_of(choose(Need(devices=2, is_linked=True), view)) == ("G0", "G2")


def test_a_resumed_job_gets_its_devices_whatever_is_known_of_their_links() -> None:
    need = Need(devices=2, is_linked=True, is_resumed=True, only=("G0", "G2"))
    assert place(need, Topology()) == ("G0", "G2")
    assert place(need, PAIRS) == ("G0", "G2")


def test_a_set_is_reserved_for_a_linked_head_and_others_start_beside_it() -> None:
    """Two of the first group are leased. The head reserves one group; a job on one card starts in the other."""
    head = queue(1, Need(devices=4, is_linked=True), priority=5)
    leases = [lease("a", "G0", "G1"), lease("b", "G4")]
    snapshot = linked_machine(EIGHT)
    plan = decide(view(head, queue(2, Need(), 20, 21, 22, 23, 24), on=snapshot, leases=leases))
    assert set(started(plan).values()) == {("G5",), ("G6",), ("G7",)}


@pytest.mark.parametrize("waited_s", [1.0, PATIENCE_S + 1.0])
def test_a_linked_request_ahead_reserves_a_set_and_not_the_whole_machine(waited_s: float) -> None:
    ahead = (ticket(Need(devices=4, is_linked=True), since=-waited_s),)
    leases = (lease("a", "G0"), lease("b", "G4"))
    found = choose(Need(), Machine(now=0.0, snapshot=linked_machine(EIGHT), leases=leases, ahead=ahead))
    assert devices_of(found)[0] in {"G5", "G6", "G7"}


def test_a_preemption_frees_a_linked_set() -> None:
    """The cheapest two victims are in two pairs; the cheapest pair has to leave."""
    leases = tuple(held(number, f"G{number}") for number in range(4))
    running = [job(0, 1.0), job(1, 50.0), job(2, 2.0), job(3, 3.0)]
    snapshot = linked_machine(PAIRS, *(card(index) for index in range(4)))
    state = PlacementState(Machine(now=0.0, snapshot=snapshot, leases=leases))
    assert ids_of(find_victims(Need(devices=2), state, running, URGENT)) == {0, 2}
    assert ids_of(find_victims(Need(devices=2, is_linked=True), state, running, URGENT)) == {2, 3}


def test_free_devices_outside_a_linked_set_spare_no_victim_in_it() -> None:
    """Two cards are free, one in each pair: the job needs a whole pair."""
    snapshot = linked_machine(PAIRS, *(card(index) for index in range(4)))
    leases = held(1, "G1"), held(3, "G3")
    state = PlacementState(Machine(now=0.0, snapshot=snapshot, leases=leases))
    need = Need(devices=2, is_linked=True)
    assert ids_of(find_victims(need, state, [job(1, 5.0), job(3, 9.0)], URGENT)) == {1}


@pytest.mark.parametrize(
    ("need", "topology", "complaint"),
    [
        (Need(devices=5, is_linked=True), EIGHT,
         "5 GPUs joined by NVLink or XGMI needed; this machine has GPU 0, 1, 2, 3; GPU 4, 5, 6, 7"),
        (Need(devices=5, is_on_one_node=True), EIGHT,
         "5 GPUs on one NUMA node needed; this machine has GPU 0, 1, 2, 3; GPU 4, 5, 6, 7"),
        (Need(devices=2, is_linked=True), Topology(),
         "2 GPUs joined by NVLink or XGMI needed; this machine has none that are known to be"),
        (Need(devices=3, is_linked=True, is_on_one_node=True), merge(on_nodes("02", "13"), groups("0123")),
         "3 GPUs joined by NVLink or XGMI and on one NUMA node needed; this machine has GPU 0, 2; GPU 1, 3"),
    ],
)  # fmt: skip
def test_a_request_that_no_set_could_serve_is_refused_with_what_there_is(
    need: Need, topology: Topology, complaint: str
) -> None:
    snapshot = linked_machine(topology)
    with pytest.raises(UserError) as caught:
        check_possible(need, snapshot.devices, snapshot)
    assert str(caught.value) == complaint
    check_possible(replace(need, is_linked=False, is_on_one_node=False), snapshot.devices, snapshot)


def test_cards_that_are_too_small_do_not_make_a_set() -> None:
    cards = [card(0), card(1, memory_total_mb=8 * GB), card(2), card(3)]
    snapshot = linked_machine(groups("01", "23"), *cards)
    check_possible(replace(shared(20 * GB, devices=2), is_linked=True), snapshot.devices, snapshot)
    with pytest.raises(UserError):
        check_possible(replace(shared(20 * GB, devices=2), is_linked=True), snapshot.devices[:3], snapshot)
