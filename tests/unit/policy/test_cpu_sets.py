"""Which CPUs jobs get: disjoint, as many as declared, near their GPUs, and never none."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.units import format_cpu_numbers
from gpuyard.policy.host_room import CpuLayout, choose_cpus, owned_cpus, parse_cpus

TWO_NODES = CpuLayout(
    allowed=frozenset(range(16)), nodes={0: frozenset(range(8)), 1: frozenset(range(8, 16))}
)  # fmt: skip


def test_which_cpus_a_job_gets() -> None:
    assert choose_cpus(4, TWO_NODES, (), {1}) == (8, 9, 10, 11)
    assert choose_cpus(4, TWO_NODES, (8, 9), {1}) == (10, 11, 12, 13)
    assert choose_cpus(10, TWO_NODES, (), {1}) == (0, 1, *range(8, 16)), "what the node lacks comes from the other"
    assert choose_cpus(4, TWO_NODES, (), {None, 1}) == (8, 9, 10, 11), "the node of the GPUs goes first"
    # Without a node of a GPU the smallest group that is large enough is used.
    assert choose_cpus(4, TWO_NODES, range(3), ()) == (3, 4, 5, 6)
    assert choose_cpus(6, TWO_NODES, range(3), ()) == tuple(range(8, 14))
    assert choose_cpus(4, TWO_NODES, (), {None}) == (0, 1, 2, 3)
    # Jobs without a declaration run on what is left and never on none.
    assert choose_cpus(None, TWO_NODES, range(14), {0}) == (14, 15)
    assert choose_cpus(None, TWO_NODES, range(16), {0}) == tuple(range(16))
    assert choose_cpus(4, TWO_NODES, range(14), {0}) == (14, 15), "too few are left: it shares them"
    assert choose_cpus(None, CpuLayout(), (), ()) == (), "nothing is known: anywhere"
    # An attempt owns its CPUs only if it has as many as it declared.
    assert owned_cpus([(2, (0, 1)), (None, (2, 3)), (4, (4, 5))]) == {0, 1}


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), (None, set()), ("x-2", set())]
)
def test_lists_of_cpus_are_written_as_the_kernel_does(text: str | None, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert not cpus or format_cpu_numbers(cpus) == text


@given(cpus=st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_survives_being_written_and_read(cpus: frozenset[int]) -> None:
    assert parse_cpus(format_cpu_numbers(cpus)) == cpus


@st.composite
def layouts(draw: st.DrawFn) -> CpuLayout:
    allowed = draw(st.frozensets(st.integers(0, 31), min_size=1))
    node_of = {cpu: draw(st.integers(0, 4)) for cpu in sorted(allowed)}  # node 4 stands for unknown
    nodes = {node: frozenset(cpu for cpu, its in node_of.items() if its == node) for node in range(4)}
    return CpuLayout(allowed=allowed, nodes={node: cpus for node, cpus in nodes.items() if cpus})


@given(
    layout=layouts(),
    wishes=st.lists(st.tuples(st.none() | st.integers(1, 12), st.frozensets(st.none() | st.integers(0, 3)))),
)
def test_sets_are_disjoint_and_near_gpus(
    layout: CpuLayout, wishes: list[tuple[int | None, frozenset[int | None]]]
) -> None:
    live: list[tuple[int | None, tuple[int, ...]]] = []
    for wanted, near in wishes:
        taken = owned_cpus(live)
        free = layout.allowed - taken
        got = choose_cpus(wanted, layout, taken, near)
        assert got
        assert set(got) <= layout.allowed
        if wanted is None or wanted > len(free):
            assert set(got) == (free or layout.allowed)
        else:
            assert len(set(got)) == wanted
            assert not taken & set(got)
            near_cpus = free & frozenset[int]().union(*(layout.nodes.get(node or 0, ()) for node in near - {None}))
            assert len(near_cpus & set(got)) == min(wanted, len(near_cpus)), "near CPUs are used first"
            live.append((wanted, got))
    for (_, one), (_, other) in combinations(live, 2):
        assert not set(one) & set(other)
