"""What an engine that places work itself accepts now, and how much of it a job needs."""

import math
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpuyard.model.job_spec import StopWarning
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice
from gpuyard.model.units import format_size

ROUNDING = 1e-6
# For how long a node gets no jobs after one could not start there.
LEAVE_OUT_S = 600.0


class Amount(Struct, frozen=True, kw_only=True):
    """An amount of GPUs, CPUs and RAM. None: the engine does not count this resource."""

    gpus: float | None = None
    cpus: float | None = None
    ram_mb: float | None = None


class Offer(Struct, frozen=True, kw_only=True):
    """What an engine accepts now. An engine with its own queue reports neither `free` nor `nodes`."""

    trouble: str | None = None  # why it accepts nothing at the moment; None if it works
    free: Amount | None = None  # only jobs that fit into it are handed over, in queue order
    nodes: tuple[Amount, ...] = ()  # what each node has in total, if known; a job runs on one node
    most_jobs: int | None = None  # limit of live jobs
    most_in_array: int | None = None  # an array of up to this many jobs keeps its limit at the engine itself
    card_mb: float | None = None  # memory of each of its GPUs, if configured


class Basis(StrEnum):
    """Where a figure of the terms comes from."""

    DECLARED = "declared"
    LEARNED = "learned"  # from earlier runs
    GROWN = "grown"  # more than the attempt had that ran out of memory
    DEFAULT = "default"


class ClusterTerms(Struct, frozen=True, kw_only=True):
    """What an attempt needs from an engine that places it, in place of a claim."""

    need: Need
    name: str
    priority: int = 0
    cpus: int | None = None
    ram_mb: float | None = None
    limit_s: float | None = None  # the user's time limit
    expected_s: float | None = None  # without one, far longer than this command ever took
    group: int | None = None
    at_most: int | None = None  # jobs of `group` that run at once
    options: tuple[str, ...] = ()  # passed to the engine as the user typed them
    warning: StopWarning | None = None  # the signal before the end, if wanted
    memory_basis: Basis = Basis.DECLARED  # of the memory on each GPU
    ram_basis: Basis = Basis.DECLARED
    time_basis: Basis = Basis.DECLARED


def without_learned(terms: ClusterTerms) -> ClusterTerms:
    """Return the terms without learned amounts: jobs with which they are equal can be one submission."""
    need = terms.need
    if terms.memory_basis is Basis.LEARNED:
        need = replace(need, memory=FixedMemory(0.0))
    is_set = terms.ram_basis in (Basis.DECLARED, Basis.GROWN)
    ram_mb, basis = (terms.ram_mb, terms.ram_basis) if is_set else (None, Basis.DEFAULT)
    limit = {"expected_s": None, "time_basis": Basis.DEFAULT} if terms.limit_s is None else {}
    return replace(terms, need=need, ram_mb=ram_mb, ram_basis=basis, **limit)


def whole_gpu_basis(terms: ClusterTerms) -> str:
    """Return where the number of GPUs comes from for a job that gets whole ones."""
    is_shared = terms.memory_basis is Basis.DEFAULT and terms.need.devices == 1
    return f"{Basis.DEFAULT}: a whole GPU until its memory is known" if is_shared else Basis.DECLARED


def most_of(alike: Sequence[ClusterTerms]) -> ClusterTerms:
    """Return the terms of one submission of jobs that differ in learned amounts only: the most of each amount."""
    largest = max(alike, key=lambda each: each.need.required_mb or 0.0)
    least_known = min(alike, key=lambda each: each.ram_mb or 0.0)
    ram = least_known if not least_known.ram_mb else max(alike, key=lambda each: each.ram_mb or 0.0)
    times = [each.expected_s for each in alike]
    expected_s = None if None in times else max(each for each in times if each is not None)
    return replace(largest, ram_mb=ram.ram_mb, ram_basis=ram.ram_basis, expected_s=expected_s)


def impossible(engine: str, nodes: Sequence[Amount], wanted: Amount) -> str | None:
    """Return why no node can ever run a job with this need, or None if one can, or if no node is known."""
    needs = asdict(wanted)
    texts = {"gpus": f"{wanted.gpus or 0:g} GPUs", "cpus": f"{wanted.cpus or 0:g} CPUs"}
    texts["ram_mb"] = f"{format_size(wanted.ram_mb or 0.0)} of RAM"
    if not nodes or any(
        all(had is None or (needs[name] or 0.0) <= had + ROUNDING for name, had in asdict(node).items())
        for node in nodes
    ):
        return None
    for name, needed in needs.items():
        largest = max((had for node in nodes if (had := getattr(node, name)) is not None), default=None)
        if largest is not None and (needed or 0.0) > largest + ROUNDING:
            most = format_size(largest) if name == "ram_mb" else f"{largest:g}"
            text = texts[name].removesuffix("s") if needed == 1 else texts[name]
            return f"no node of {engine} has {text}; the largest has {most}"
    return f"no node of {engine} has {', '.join(texts[name] for name, needed in needs.items() if needed)} together"


def gpu_count(need: Need, card_mb: float | None) -> float:
    """Return how many GPUs the need is. A job that shares its GPU needs a fraction, if the GPU size is known."""
    if need.devices != 1 or need.is_exclusive:
        return float(need.devices)
    if isinstance(need.memory, PartOfDevice):
        part = need.memory.part
    elif need.required_mb is not None and card_mb:
        part = need.required_mb / card_mb
    else:
        return 1.0
    # Ray counts GPUs with four decimal places. Round up, so that a job never gets less than it needs, but keep as many
    # jobs per GPU: three thirds still fit.
    part = max(part, 0.0001)
    most = max(1, math.floor(1.0 / part + ROUNDING))
    return min(math.ceil(part * 10_000 - ROUNDING), 10_000 // most) / 10_000


def amount_needed(terms: ClusterTerms, card_mb: float | None) -> Amount:
    """Return the resources that a job needs; one CPU by default."""
    return Amount(gpus=gpu_count(terms.need, card_mb), cpus=float(terms.cpus or 1), ram_mb=terms.ram_mb or 0.0)


def subtract(free: Amount, taken: Amount) -> Amount:
    """Subtract `taken` from `free` per field; None stays None."""
    used = asdict(taken)
    left = {name: None if had is None else had - (used[name] or 0.0) for name, had in asdict(free).items()}
    return Amount(**left)
