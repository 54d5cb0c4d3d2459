"""Which CPUs a job runs on, where jobs get CPUs of their own (`[host] pin_cpus`).

- A job that declared N CPUs gets N that no other such job has: from the NUMA nodes of its GPUs first, and from as few
  nodes as possible. If fewer are free, it shares what is left.
- A job that declared none runs on the CPUs that no job has for itself. If none is left, it runs on all: never on none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct


class CpuLayout(Struct, frozen=True, kw_only=True):
    """The CPUs that jobs may use, and the NUMA node of each; a CPU whose node is unknown is in no node."""

    allowed: frozenset[int] = frozenset()
    nodes: Mapping[int, frozenset[int]] = {}


def choose_cpus(
    wanted: int | None, layout: CpuLayout, taken: Collection[int], near: Collection[int | None]
) -> tuple[int, ...]:
    """Return the CPUs for a job that declared `wanted`; None: it declared none. `taken` are the CPUs that other jobs
    have for themselves, `near` the NUMA nodes of its GPUs. Empty if no CPUs are known: then it runs anywhere."""
    free = layout.allowed - frozenset(taken)
    if wanted is None or wanted > len(free):
        return tuple(sorted(free or layout.allowed))
    chosen: list[int] = []
    for group in _groups(free, layout, near, wanted):
        chosen += sorted(group)[: wanted - len(chosen)]
        if len(chosen) == wanted:
            break
    return tuple(sorted(chosen))


def _groups(
    free: frozenset[int], layout: CpuLayout, near: Collection[int | None], wanted: int
) -> Iterable[frozenset[int]]:
    """Return the free CPUs of each node, in the order in which they are used: near ones first; of those, the smallest
    group that is large enough, so that larger ones stay whole; else the largest."""
    in_nodes = {node: cpus & free for node, cpus in layout.nodes.items()}
    unknown = free - frozenset[int]().union(*layout.nodes.values())

    def rank(node: int) -> tuple[bool, bool, int, int]:
        size = len(in_nodes[node])
        is_enough = size >= wanted
        return node not in near, not is_enough, size if is_enough else -size, node

    return [*(in_nodes[node] for node in sorted(in_nodes, key=rank)), unknown]


def owned_cpus(attempts: Iterable[tuple[int | None, Sequence[int]]]) -> frozenset[int]:
    """Return the CPUs that jobs have for themselves. `attempts` are pairs of the declared number and the CPUs of a live
    attempt: with another number of CPUs it shares them."""
    return frozenset(cpu for declared, cpus in attempts if declared == len(cpus) for cpu in cpus)


def parse_cpus(text: str | None) -> frozenset[int]:
    """Return the CPUs of a list as the kernel writes it, such as `0-3,8`; none if it cannot be parsed."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return frozenset()
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)
