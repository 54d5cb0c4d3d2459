"""The best-linked set of devices, held against trying every set."""

from itertools import combinations
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Lease, Need
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.policy import linked_sets
from gpuyard.policy.device_names import check_possible
from gpuyard.policy.linked_sets import SetConditions, best_set, broken, is_joined, score
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import PATIENCE_S
from gpuyard.policy.placement import PlacementState, choose
from gpuyard.policy.plan import decide
from gpuyard.policy.preempt import find_victims
from gpuyard.policy.wait_reasons import ReasonKind
from tests.known import known
from tests.scale import size
from tests.unit.policy.test_placement import GB, card, devices_of, kinds_of, lease, machine, on_cards, shared, ticket
from tests.unit.policy.test_planner import queue, started, view
from tests.unit.policy.test_preemption import URGENT, held, job
from tests.unit.policy.test_preemption import ids as ids_of

KINDS = [*LinkKind]


def ids(count: int) -> list[str]:
    return [f"G{index}" for index in range(count)]


def groups(*spans: str, kind: LinkKind = LinkKind.NVLINK, count: int | None = 4) -> Topology:
    """Return a topology in which the devices of each span, such as "0123", are joined."""
    links = [
        Link(one=f"G{one}", other=f"G{other}", kind=kind, count=count)
        for span in spans
        for one, other in combinations(span, 2)
    ]
    return Topology(links=tuple(links))


def on_nodes(*spans: str) -> Topology:
    nodes = {f"G{index}": node for node, span in enumerate(spans) for index in span}
    return Topology(links=tuple(link_by_nodes(list(nodes), nodes)), nodes=nodes)


EIGHT = merge(on_nodes("0123", "4567"), groups("0123", "4567"))


@st.composite
def topologies(draw: st.DrawFn, most: int = 8) -> tuple[Topology, list[str]]:
    """Return a link of few kinds for each pair, or groups with some links changed, as both have other symmetries."""
    devices = ids(draw(st.integers(2, most)))
    if draw(st.booleans()):
        few = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=3))
        random = Random(draw(st.integers(0, 1 << 20)))
        every = (
            Link(one=one, other=other, kind=random.choice(few), count=random.randint(1, 2))
            for one, other in combinations(devices, 2)
        )
        return Topology(links=tuple(every), nodes={each: random.randint(0, 1) for each in devices}), devices
    base = draw(st.sampled_from([Topology(), EIGHT, groups("01", "23", "45"), on_nodes("0246", "1357")]))
    pairs = list(combinations(devices, 2))
    kinds = st.sampled_from(KINDS)
    changed = draw(st.dictionaries(st.sampled_from(pairs), st.tuples(kinds, st.integers(1, 3))))
    links = tuple(Link(one=one, other=other, kind=kind, count=count) for (one, other), (kind, count) in changed.items())
    known = Topology(links=tuple(link for link in base.links if {link.one, link.other} <= set(devices)))
    nodes = draw(st.dictionaries(st.sampled_from(devices), st.integers(0, 1)))
    return merge(known, Topology(links=links, nodes=nodes)), devices


conditions = st.builds(
    SetConditions,
    count=st.integers(1, 6),
    is_linked=st.sampled_from([False, False, True]),
    is_on_one_node=st.sampled_from([False, False, True]),
)


def meets(topology: Topology, devices: tuple[str, ...], wanted: SetConditions) -> bool:
    if wanted.is_linked and not is_joined(topology, devices):
        return False
    nodes = {topology.nodes.get(each) for each in devices}
    return not wanted.is_on_one_node or (len(nodes) == 1 and None not in nodes)


@settings(max_examples=size(200, full=1000))
@given(topologies(), conditions, st.data())
def test_no_other_set_is_linked_better_or_breaks_less(
    drawn: tuple[Topology, list[str]], wanted: SetConditions, data: st.DataObject
) -> None:
    topology, devices = drawn
    candidates = data.draw(st.permutations(devices).map(lambda each: each[: max(1, len(each) - 1)]))
    idle = data.draw(st.sets(st.sampled_from(devices)))
    every = [each for each in combinations(candidates, wanted.count) if meets(topology, each, wanted)]
    found = best_set(topology, candidates, wanted, idle)
    if not every:
        assert found is None
        return
    assert found is not None
    assert len(set(found)) == wanted.count
    assert set(found) <= set(candidates)
    assert meets(topology, found, wanted)

    def rank(devices: tuple[str, ...]) -> tuple[int, int, int, list[int]]:
        weakest, total = score(topology, devices)
        return -weakest, -total, broken(topology, devices, idle), sorted(map(candidates.index, devices))

    assert rank(found) == min(map(rank, every))


@given(topologies(most=7), conditions)
def test_a_greedy_set_is_found_wherever_one_exists(drawn: tuple[Topology, list[str]], wanted: SetConditions) -> None:
    topology, devices = drawn
    exact = best_set(topology, devices, wanted)
    with mock.patch.object(linked_sets, "MOST_SETS", 0):
        greedy = best_set(topology, devices, wanted)
    assert (greedy is None) == (exact is None)
    if greedy is not None:
        assert len(set(greedy)) == wanted.count
        assert meets(topology, greedy, wanted)


def test_which_set_is_best() -> None:
    idle = {"G0", "G1", "G2", "G3", "G6", "G7"}
    assert best_set(EIGHT, sorted(idle), SetConditions(count=2), idle) == ("G6", "G7")
    # A busy device is taken before an idle one with the same links.
    both = groups("02", "12")
    assert best_set(both, ["G0", "G1"], SetConditions(count=1), {"G0", "G2"}) == ("G1",)
    # The weakest link counts before the sum.
    star = groups("01", "02", "03", count=9)
    ring = groups("456", kind=LinkKind.PCIE_SWITCH)
    assert best_set(merge(star, ring), ids(7), SetConditions(count=3)) == ("G4", "G5", "G6")
    both = merge(groups("01", count=1), groups("23", count=2))
    assert best_set(both, ids(4), SetConditions(count=2)) == ("G2", "G3"), "more links between two devices are better"
    # Devices of unknown node are on no node.
    assert best_set(groups("01"), ids(2), SetConditions(count=2, is_on_one_node=True)) is None
    # A chain is linked though its ends are not neighbours.
    chain = groups("01", "12", "23")
    assert best_set(chain, ids(4), SetConditions(count=4, is_linked=True)) is not None
    assert best_set(chain, ["G0", "G1", "G3"], SetConditions(count=3, is_linked=True)) is None


def test_sixteen_devices_in_groups_are_few_sets() -> None:
    devices = [f"G{index:x}" for index in range(16)]
    two = groups("01234567", "89abcdef")
    alike = linked_sets._interchangeable(two, devices, set(devices))
    assert linked_sets._count_sets(alike, 8) == 9
    assert best_set(two, devices, SetConditions(count=8), set(devices)) == tuple(devices[:8])


def test_a_large_machine_without_symmetry_is_searched_greedily() -> None:
    devices = [f"D{index}" for index in range(40)]
    links = tuple(
        Link(one=one, other=other, kind=LinkKind.NVLINK, count=1 + (devices.index(one) * 7 + devices.index(other)) % 5)
        for one, other in combinations(devices, 2)
    )
    found = known(best_set(Topology(links=links), devices, SetConditions(count=20, is_linked=True), set(devices)))
    assert len(set(found)) == 20


PAIRS = groups("01", "23", "45", "67")


def linked_machine(topology: Topology, *cards: Device, count: int = 8) -> Snapshot:
    return replace(machine(*(cards or (card(index) for index in range(count)))), topology=topology)


def place(need: Need, topology: Topology, *busy: str, **changes: Any) -> tuple[str, ...]:
    """Return the devices that the need gets on eight cards, some of which are leased as a whole."""
    leases = (lease("busy", *busy),) if busy else ()
    return devices_of(choose(need, Machine(now=0.0, snapshot=linked_machine(topology), leases=leases, **changes)))


@given(topologies(), st.integers(1, 5), st.booleans(), st.data())
def test_a_claim_has_the_best_links_of_all_free_sets(
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


def test_jobs_keep_groups_whole() -> None:
    assert place(Need(devices=4), EIGHT, "G0") == ("G4", "G5", "G6", "G7")
    assert place(shared(GB, devices=2), PAIRS, "G0", "G2") == ("G4", "G5"), "several devices are of one group"
    assert place(Need(), EIGHT, "G6") == ("G4",)
    assert place(shared(GB), EIGHT, "G6") == ("G4",), "one device is taken from the group that is broken already"
    assert place(Need(), merge(on_nodes("01234567"), PAIRS), "G4") == ("G5",)


def test_free_memory_decides_before_broken_sets_and_without_links() -> None:
    cards = [card(0), card(1, used=4 * GB), card(2, used=2 * GB)]
    view = on_cards(*cards)
    assert devices_of(choose(shared(GB, devices=2), view)) == ("G1", "G2"), "without known links memory alone decides"
    cards = [card(index, used=8 * GB if index == 0 else 0.0) for index in range(8)]
    view = Machine(now=0.0, snapshot=linked_machine(merge(EIGHT, groups("0123")), *cards), leases=())
    assert devices_of(choose(shared(GB), view)) == ("G0",), "free memory decides before broken sets for one device"
    # Megabytes that a driver holds do not decide before broken sets.
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


def test_a_set_is_of_one_vendor_and_a_resumed_job_keeps_its_own() -> None:
    cards = [card(0), card(1, vendor=Vendor.AMD), card(2)]
    view = Machine(now=0.0, snapshot=linked_machine(groups("02"), *cards))
    assert devices_of(choose(Need(devices=2, is_linked=True), view)) == ("G0", "G2")
    need = Need(devices=2, is_linked=True, is_resumed=True, only=("G0", "G2"))
    assert place(need, Topology()) == ("G0", "G2")
    assert place(need, PAIRS) == ("G0", "G2"), "a resumed job gets its devices whatever is known of their links"


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
    leases = tuple(held(number, f"G{number}") for number in range(4))
    running = [job(0, 1.0), job(1, 50.0), job(2, 2.0), job(3, 3.0)]
    snapshot = linked_machine(PAIRS, *(card(index) for index in range(4)))
    state = PlacementState(Machine(now=0.0, snapshot=snapshot, leases=leases))
    assert ids_of(find_victims(Need(devices=2), state, running, URGENT)) == {0, 2}
    assert ids_of(find_victims(Need(devices=2, is_linked=True), state, running, URGENT)) == {2, 3}
    # Free devices outside a linked set spare no victim in it.
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
def test_a_request_that_no_set_could_serve_is_refused(need: Need, topology: Topology, complaint: str) -> None:
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
