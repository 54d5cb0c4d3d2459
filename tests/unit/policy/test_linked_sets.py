"""The best-linked set of devices, held against trying every set."""

from itertools import combinations
from random import Random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.policy import linked_sets
from gpuyard.policy.linked_sets import SetConditions, best_set, broken, is_joined, score
from tests.scale import size

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
def test_a_greedy_set_meets_the_conditions_wherever_one_exists(
    drawn: tuple[Topology, list[str]], wanted: SetConditions
) -> None:
    topology, devices = drawn
    exact = best_set(topology, devices, wanted)
    with mock.patch.object(linked_sets, "MOST_SETS", 0):
        greedy = best_set(topology, devices, wanted)
    assert (greedy is None) == (exact is None)
    if greedy is not None:
        assert len(set(greedy)) == wanted.count
        assert meets(topology, greedy, wanted)


def test_a_set_is_taken_from_the_group_that_is_broken_already() -> None:
    idle = {"G0", "G1", "G2", "G3", "G6", "G7"}
    assert best_set(EIGHT, sorted(idle), SetConditions(count=2), idle) == ("G6", "G7")


def test_a_busy_device_is_taken_before_an_idle_one_with_the_same_links() -> None:
    both = groups("02", "12")
    assert best_set(both, ["G0", "G1"], SetConditions(count=1), {"G0", "G2"}) == ("G1",)


def test_the_weakest_link_counts_before_the_sum() -> None:
    star = groups("01", "02", "03", count=9)
    ring = groups("456", kind=LinkKind.PCIE_SWITCH)
    assert best_set(merge(star, ring), ids(7), SetConditions(count=3)) == ("G4", "G5", "G6")


def test_more_links_between_two_devices_are_better() -> None:
    both = merge(groups("01", count=1), groups("23", count=2))
    assert best_set(both, ids(4), SetConditions(count=2)) == ("G2", "G3")


def test_a_chain_is_linked_though_its_ends_are_not_neighbours() -> None:
    chain = groups("01", "12", "23")
    assert best_set(chain, ids(4), SetConditions(count=4, is_linked=True)) is not None
    assert best_set(chain, ["G0", "G1", "G3"], SetConditions(count=3, is_linked=True)) is None


def test_devices_of_unknown_node_are_on_no_node() -> None:
    assert best_set(groups("01"), ids(2), SetConditions(count=2, is_on_one_node=True)) is None


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
    found = best_set(Topology(links=links), devices, SetConditions(count=20, is_linked=True), set(devices))
    assert found is not None
    assert len(set(found)) == 20
