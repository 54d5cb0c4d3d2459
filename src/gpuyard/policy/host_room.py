"""RAM and CPUs of the host: what leases reserve and use, what is left, and which CPUs a job runs on.

Each lease is charged the larger of its reservation and its use, and a floor stays free; together leases reserve no more
than the RAM without the floor. CPUs are counted by what users declare. A figure that no probe reads limits nothing.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host
from gpuyard.model.units import format_count, format_size
from gpuyard.policy.numbers import DECLARED_PERCENT, FLOOR_PART, LEAST_FLOOR_MB, MOST_OF_RAM
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind, list_holders, over


class HostLimits(Struct, frozen=True, kw_only=True):
    """`[host]` of the configuration: RAM that stays free (None: the default floor), and how many percent of the CPUs
    may be reserved (None: 100 by declared CPUs, and learned ones do not count)."""

    keep_free_mb: float | None = None
    max_cpu_load_percent: float | None = None


class HostUse(Struct, frozen=True, kw_only=True):
    """RAM and CPUs that the processes of a lease use; None where they cannot be measured."""

    ram_mb: float | None = None
    cpus: float | None = None


class HostView(Struct, frozen=True, kw_only=True):
    """The limits, and the measured use by lease id. A lease that is missing there uses what its record says. `machine`
    is the name of this machine or container: within the limit of a container, leases outside of it do not count."""

    limits: HostLimits = HostLimits()
    used: Mapping[str, HostUse] = {}
    machine: str | None = None


class PromisedHostShare(Struct, frozen=True, kw_only=True):
    """RAM and CPUs that are leased (with a `lease_id`), claimed by this plan, or reserved for a request ahead."""

    share: HostShare
    holder: Holder
    used: HostUse = HostUse(ram_mb=0.0)
    is_reservation: bool = False
    lease_id: str | None = None


def floor_mb(keep_free_mb: float | None, total_mb: float | None) -> float | None:
    """Return how much RAM stays free: no reservation may take it, and below it the host guard acts. Without a setting:
    the larger of 2 GB and 5%, up to a quarter of the RAM; None if the size of the RAM is unknown."""
    if keep_free_mb is not None:
        return keep_free_mb
    return None if total_mb is None else min(max(LEAST_FLOOR_MB, FLOOR_PART * total_mb), MOST_OF_RAM * total_mb)


def grantable_mb(host: Host, limits: HostLimits) -> float | None:
    """Return the RAM that all leases together may reserve; None where the RAM of the machine is unknown."""
    total_mb = host.memory_total_mb
    return None if total_mb is None else max(0.0, total_mb - (floor_mb(limits.keep_free_mb, total_mb) or 0.0))


def grantable_cpus(host: Host, limits: HostLimits) -> float | None:
    percent = limits.max_cpu_load_percent or DECLARED_PERCENT
    return None if host.cpu_count is None else host.cpu_count * percent / 100.0


def check_host(need: Need, host: Host, limits: HostLimits) -> None:
    """Raise UserError for a request of more RAM or CPUs than this machine can ever give."""
    most_mb, most_cpus = grantable_mb(host, limits), grantable_cpus(host, limits)
    if need.ram_mb is not None and most_mb is not None and need.ram_mb > most_mb:
        given = f"{format_size(most_mb)} of {format_size(host.memory_total_mb)}"
        floor = format_size(floor_mb(limits.keep_free_mb, host.memory_total_mb) or 0.0)
        raise UserError(
            f"{format_size(need.ram_mb)} of RAM is more than this machine can give ({given})",
            hint=f"ask for less; keep_free under [host] in the configuration keeps {floor} free",
            code="impossible",
        )
    if need.cpus is not None and most_cpus is not None and need.cpus > most_cpus + 1e-6:
        raise UserError(
            f"{format_cpus(need.cpus)} are more than this machine can give ({most_cpus:g} of {host.cpu_count or 0:g})",
            hint="ask for fewer, or raise max_cpu_load under [host] in the configuration",
            code="impossible",
        )


def host_refusals(need: Need, host: Host) -> Iterator[Reason]:
    """Yield which of the need's own limits of CPU load and free RAM do not hold."""
    if host.cpu_percent is not None and need.max_cpu_percent is not None and host.cpu_percent > need.max_cpu_percent:
        reason = over(ReasonKind.HOST_TOO_BUSY, host.cpu_percent, need.max_cpu_percent)
        yield replace(reason, remedy=REMEDIES["host-too-busy"])
    available = host.memory_available_mb
    if need.min_host_memory_mb is not None and available is not None and available < need.min_host_memory_mb:
        text = f"{available:.0f} MB of RAM available < {need.min_host_memory_mb:.0f} MB"
        yield Reason(ReasonKind.HOST_TOO_FULL, text, remedy=REMEDIES["host-too-full"])


def format_cpus(cpus: float) -> str:
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'}"


class HostState:
    """The host and its promised shares, with their sums. Never changes after construction."""

    def __init__(self, host: Host, limits: HostLimits, promises: Iterable[PromisedHostShare]) -> None:
        self.host = host
        self._limits = limits
        self._cpu_limit = grantable_cpus(host, limits)
        self.floor_mb = floor_mb(limits.keep_free_mb, host.memory_total_mb) or 0.0
        self.promises: tuple[PromisedHostShare, ...] = ()
        self.reserved_mb = self.pending_mb = self.charged_cpus = 0.0
        self._add(promises)

    def _add(self, promises: Iterable[PromisedHostShare]) -> None:
        for each in promises:
            share, used = each.share, each.used
            self.promises += (each,)
            self.reserved_mb += share.ram_mb or 0.0
            self.pending_mb += max(0.0, (share.ram_mb or 0.0) - (used.ram_mb or 0.0))  # reserved and not taken yet
            if share.cpus is not None and self._counts_cpus(share):
                self.charged_cpus += used.cpus if share.are_cpus_learned and used.cpus is not None else share.cpus

    @property
    def free_mb(self) -> float | None:
        """RAM that can still be reserved; below 0 where more is taken than may be; None where nothing is known."""
        available, total = self.host.memory_available_mb, self.host.memory_total_mb
        bounds = [] if available is None else [available - self.pending_mb]
        bounds += [] if total is None else [total - self.reserved_mb]
        return min(bounds) - self.floor_mb if bounds else None

    @classmethod
    def of_leases(cls, host: Host, view: HostView, leases: Sequence[Lease]) -> "HostState":
        has_own_limit, promises = host.limited_by is not None and view.machine is not None, []
        for lease in leases:
            share, is_elsewhere = lease.host, lease.holder.machine not in (None, view.machine)
            if share is not None and not (has_own_limit and is_elsewhere):
                used = view.used.get(lease.id) or HostUse(ram_mb=share.used_mb, cpus=share.used_cpus)
                promises.append(PromisedHostShare(share=share, holder=lease.holder, lease_id=lease.id, used=used))
        return cls(host, view.limits, promises)

    def with_promise(self, promise: PromisedHostShare) -> "HostState":
        other = copy.copy(self)
        other._add((promise,))  # noqa: SLF001 - its own copy
        return other

    def without_leases(self, ended: Collection[str] | None = None) -> "HostState":
        """Return the host as it will be once these leases (None: all) have ended, and what they use is free again."""
        gone = [each for each in self.promises if ended is None or each.lease_id in ended]
        left = () if ended is None else (each for each in self.promises if each.lease_id not in ended)
        total, available = self.host.memory_total_mb, self.host.memory_available_mb
        if available is not None:
            available += sum(each.used.ram_mb or 0.0 for each in gone)
            available = available if total is None else min(available, total)
        return HostState(replace(self.host, memory_available_mb=available), self._limits, left)

    def lacks(self, need: Need) -> Literal["RAM", "CPUs"] | None:
        """Return what is missing for the need now, or None."""
        share, limit = need.host, self._cpu_limit
        if share is None:
            return None
        if share.ram_mb is not None and (free_mb := self.free_mb) is not None and share.ram_mb > free_mb:
            return "RAM"
        if share.cpus is None or limit is None or not self._counts_cpus(share):
            return None
        is_alone = share.are_cpus_learned and not self.charged_cpus
        # Sums of fractions are never quite what they should be.
        return None if is_alone or self.charged_cpus + share.cpus <= limit + 1e-6 else "CPUs"

    def reasons(self, need: Need) -> Iterator[Reason]:
        what = self.lacks(need)
        if what is None:
            return
        ahead = [each for each in self.promises if each.is_reservation]
        granted = [each for each in self.promises if not each.is_reservation]
        if ahead and HostState(self.host, self._limits, granted).lacks(need) is None:
            holders = tuple(each.holder for each in ahead)
            text = f"{what} reserved for {list_holders(holders)}, ahead in the queue"
            yield Reason(ReasonKind.AWAITED, text, holders=holders, is_leased=True)
            return
        is_leased = self.without_leases().lacks(need) is None
        if what == "CPUs":
            limit, needed = self._cpu_limit or 0.0, need.cpus or 0.0
            had = max(0.0, limit - self.charged_cpus)
            text, brief = f"{had:g} of {format_cpus(limit)} free, {needed:g} needed", "too few free CPUs{beside}"
        else:
            is_leased = (
                is_leased and self.host.memory_available_mb is None
            )  # memory in use is free in a new sample only
            had, needed = max(0.0, self.free_mb or 0.0), need.ram_mb or 0.0
            kept = f"{format_size(self.pending_mb)} promised, {format_size(self.floor_mb)} kept free"
            text = f"{format_size(had)} of {format_size(self.host.memory_total_mb)} RAM free"
            text, brief = f"{text}, {format_size(needed)} needed ({kept})", "too little free RAM{beside}"
        holders = tuple(dict.fromkeys(each.holder for each in granted))
        text += f", beside {list_holders(holders)}" if holders else ""
        remedy = REMEDIES["host-memory" if what == "RAM" else "host-cpus"]
        yield Reason(ReasonKind.HOST_ROOM, text, None, had, needed, holders, remedy, is_leased, brief)

    def _counts_cpus(self, share: HostShare) -> bool:
        return not share.are_cpus_learned or self._limits.max_cpu_load_percent is not None


class HostReserved(Struct, frozen=True, kw_only=True):
    """What leases reserve of the host. `free_mb` can still be reserved; `floor_mb` stays free."""

    leases: int
    ram_mb: float
    cpus: float
    floor_mb: float
    free_mb: float | None


def sum_reserved(state: HostState) -> HostReserved:
    return HostReserved(
        leases=len(state.promises),
        ram_mb=state.reserved_mb,
        cpus=sum(each.share.cpus or 0.0 for each in state.promises),
        floor_mb=state.floor_mb,
        free_mb=None if state.free_mb is None else max(0.0, state.free_mb),
    )


def describe_reserved(found: HostReserved) -> str:
    """Return the line of `gpuyard devices` about the host."""
    more = f" and {format_cpus(round(found.cpus, 1))}" if found.cpus else ""
    free = f"; {format_size(found.free_mb)} left to reserve" if found.free_mb is not None else ""
    by = f"reserved by {format_count(found.leases, 'lease')}, {format_size(found.floor_mb)} kept free"
    return f"{format_size(found.ram_mb)} of RAM{more} {by}{free}"


class HostPlacement:
    """RAM and CPUs of the host, as they fill while a plan is made."""

    def __init__(self, host: Host, view: HostView, leases: Sequence[Lease]) -> None:
        self._host = host
        self.state = HostState.of_leases(host, view, leases)
        self._after: HostState | None = None  # the host once older leases have ended, with what is kept for `_kept_for`
        self._kept_for: Holder | None = None

    def lacks(self, need: Need) -> bool:
        """Return whether less RAM or fewer CPUs are free than the need reserves."""
        return self.state.lacks(need) is not None or (self._after is not None and self._after.lacks(need) is not None)

    def refuses(self, need: Need) -> bool:
        """Return whether CPU or RAM are outside the need's own limits, or lack what it reserves."""
        return self.lacks(need) or any(host_refusals(need, self._host))

    def excludes(self, need: Need) -> bool:
        """Return whether the need is refused in a way that the end of all leases would not change."""
        if any(host_refusals(need, self._host)):
            return True
        return self.state.lacks(need) is not None and self.state.without_leases().lacks(need) is not None

    def explain(self, need: Need) -> Iterator[Reason]:
        yield from host_refusals(need, self._host)
        yield from self.state.reasons(need)
        if self.state.lacks(need) is None and self.lacks(need) and self._kept_for is not None:
            kept = f"RAM and CPUs reserved for {list_holders((self._kept_for,))}, ahead in the queue"
            yield Reason(ReasonKind.AWAITED, kept, holders=(self._kept_for,), is_leased=True)

    def add_claim(self, claim: Claim, holder: Holder, lease_id: str | None = None) -> None:
        if claim.host is not None:
            promise = PromisedHostShare(share=claim.host, holder=holder, lease_id=lease_id)
            self.state = self.state.with_promise(promise)
            self._after = self._after and self._after.with_promise(promise)

    def reserve(self, share: HostShare | None, holder: Holder, older: Collection[str] | None = None) -> None:
        """Keep the share from requests behind: now, or once the leases `older` have ended."""
        if share is None:
            return
        promise = PromisedHostShare(share=share, holder=holder, is_reservation=True)
        if older is None:
            self.state = self.state.with_promise(promise)
        else:
            self._after, self._kept_for = self.state.without_leases(older).with_promise(promise), holder


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
    in_nodes = {node: cpus & free for node, cpus in layout.nodes.items()}
    unknown = free - frozenset[int]().union(*layout.nodes.values())

    def rank(node: int) -> tuple[bool, bool, int, int]:
        """Near nodes first; of those, the smallest that is large enough, else the largest: larger ones stay whole."""
        size = len(in_nodes[node])
        is_enough = size >= wanted
        return node not in near, not is_enough, size if is_enough else -size, node

    groups = [*(in_nodes[node] for node in sorted(in_nodes, key=rank)), unknown]
    return tuple(sorted([cpu for group in groups for cpu in sorted(group)][:wanted]))


def owned_cpus(attempts: Iterable[tuple[int | None, Sequence[int]]]) -> frozenset[int]:
    """Return the CPUs that live attempts have for themselves: with another number than declared, they share them."""
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
