"""Needs, claims, leases and tickets: the devices that work asks for, and the devices that it is granted."""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Vendor


class FixedMemory(Struct, frozen=True, tag="fixed"):
    """Share each device, and reserve this much of its memory: declared by the user, or learned from past runs."""

    required_mb: float = field(name="mb")
    is_exclusive: ClassVar[bool] = False
    is_known: ClassVar[bool] = True


class UncertainMemory(Struct, frozen=True, tag="uncertain"):
    """For a job without an estimate: share each device, and reserve the expected peak, with its spread."""

    required_mb: float = field(name="mb")
    mean_mb: float
    spread_mb: float
    is_exclusive: ClassVar[bool] = False
    is_known: ClassVar[bool] = False


class PartOfDevice(Struct, frozen=True, tag="part"):
    """For a first run: share each device with jobs of the same tag. Placement gets it as FixedMemory (`sharing`)."""

    part: float
    is_exclusive: ClassVar[bool] = False
    is_known: ClassVar[bool] = True
    required_mb: ClassVar[None] = None


class WholeDevice(Struct, frozen=True, tag="whole"):
    """No other lease on the device. `required_mb` must be free beside foreign processes; None: nearly all of it."""

    required_mb: float | None = field(name="free_mb", default=None)
    is_exclusive: ClassVar[bool] = True
    is_known: ClassVar[bool] = True


class UnknownMemory(Struct, frozen=True, tag="unknown"):
    """Left open by the user. `sizing.size_need` replaces it before each start; until then it counts as exclusive."""

    is_exclusive: ClassVar[bool] = True
    is_known: ClassVar[bool] = True
    required_mb: ClassVar[None] = None


MemoryNeed: TypeAlias = FixedMemory | UncertainMemory | PartOfDevice | WholeDevice | UnknownMemory


class HostShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The RAM and CPUs that work needs or reserves; None is unknown, and reserves nothing.

    Of a lease, `used_mb` and `used_cpus` are what its processes were last seen to use. The queue writes this into its
    leases, because other users cannot tell its jobs apart; None: readers measure the holder's processes themselves.
    """

    ram_mb: float | None = None
    cpus: float | None = None
    is_ram_expected: bool = False  # neither declared nor learned, only expected of a job whose RAM is unknown
    are_cpus_learned: bool = False  # from earlier runs, not declared
    used_mb: float | None = None
    used_cpus: float | None = None


class Need(Struct, frozen=True, kw_only=True, cache_hash=True):
    """The devices that a piece of work asks for: how many, how much memory of each, and under which conditions. A limit
    that is None does not apply. A limit whose figure no probe can read counts as met."""

    devices: int = 1
    memory: MemoryNeed = WholeDevice()
    load_percent: float | None = None  # how busy the work is known to keep a device
    ignores_load: bool = False  # share a device however busy; the user has set how many jobs may share it
    ignores_foreign_load: bool = False  # share a device however busy others keep it; the work has a limit of its own
    ignores_idle_power: bool = False  # `max_power_w` is not for an idle device: some draw more whatever they do
    only: tuple[str, ...] | None = None
    banned: tuple[str, ...] = ()
    vendor: Vendor | None = None
    model: str | None = None  # a part of the device's name
    only_discrete: bool = False
    is_linked: bool = False  # NVLink or XGMI leads from each of its devices to each other (`linked_sets`)
    is_on_one_node: bool = False  # all of its devices are on one NUMA node
    max_utilization_percent: float | None = None
    max_power_w: float | None = None
    max_memory_used_mb: float | None = None
    max_cpu_percent: float | None = None
    min_host_memory_mb: float | None = None
    ignores_health: bool = False
    is_resumed: bool = False  # it continues on devices that it was granted before, despite a drain or a ban
    memory_on: tuple[tuple[str, MemoryNeed], ...] = ()  # by device id, where it differs; `memory` is the least
    host: HostShare | None = None  # the RAM and CPUs that are reserved, with devices or without any

    def on(self, device_id: str) -> "Need":
        """Return what is needed of one device."""
        memory = dict(self.memory_on).get(device_id) if self.memory_on else None
        return self if memory is None else replace(self, memory=memory, memory_on=())

    @property
    def ram_mb(self) -> float | None:
        """RAM that must be free and is reserved; None where nothing is known about it."""
        return None if self.host is None else self.host.ram_mb

    @property
    def cpus(self) -> float | None:
        return None if self.host is None else self.host.cpus

    @property
    def is_exclusive(self) -> bool:
        return self.memory.is_exclusive

    @property
    def required_mb(self) -> float | None:
        """Memory that must be free on each device; None where the need does not say."""
        return self.memory.required_mb

    @property
    def is_memory_known(self) -> bool:
        """Whether it takes no more of a device than it reserves: declared, learned, or the whole device."""
        return self.memory.is_known

    @property
    def least_mb(self) -> float | None:
        """Memory without which a device is out of the question; None where the need does not say."""
        memory = self.memory
        return min(memory.required_mb, memory.mean_mb) if isinstance(memory, UncertainMemory) else memory.required_mb

    @property
    def reserved_mb(self) -> float | None:
        """Memory that a share of a device reserves."""
        return self.memory.mean_mb if isinstance(self.memory, UncertainMemory) else self.memory.required_mb

    @property
    def spread_mb(self) -> float:
        return self.memory.spread_mb if isinstance(self.memory, UncertainMemory) else 0.0

    @property
    def limits_device_load(self) -> bool:
        has_limit = self.max_utilization_percent is not None or self.max_power_w is not None
        return has_limit or self.max_memory_used_mb is not None

    @property
    def limits_load(self) -> bool:
        """Whether it depends on the load of devices or of the host when it may start."""
        return self.limits_device_load or self.max_cpu_percent is not None or self.min_host_memory_mb is not None


def asks_for_the_same(one: Need, other: Need) -> bool:
    """Return whether both need the same, but for expected amounts and the load: these change by the second."""
    other = replace(other, load_percent=one.load_percent)
    if one.host is not None and other.host is not None and one.host.is_ram_expected and other.host.is_ram_expected:
        other = replace(other, host=one.host)
    if isinstance(one.memory, UncertainMemory) and isinstance(other.memory, UncertainMemory):
        other = replace(other, memory=one.memory)
    return one == other


def check_several(count: int, example: str, given: Sequence[str]) -> None:
    """Raise UserError where such options are given for fewer than two GPUs. `example` is how a user asks for two."""
    if given and count < 2:
        verb = "is" if len(given) == 1 else "are"
        raise UserError(
            f"{' and '.join(given)} {verb} for several GPUs, and {count or 'none'} is asked for",
            hint=f"add {example}, or leave out {' and '.join(given)}",
        )


class Share(Struct, frozen=True, kw_only=True):
    """A whole device, or a part of its memory. An exclusive share need not say how much memory it will use.
    `foreign_mb` is what foreign processes held when it was granted, where the driver lists no processes: use beyond it
    is the leases'."""

    device_id: str
    memory_mb: float | None = None  # with a `spread_mb`, only what is expected
    load_percent: float | None = None
    is_exclusive: bool = True
    foreign_mb: float | None = None
    spread_mb: float = 0.0


class Claim(Struct, frozen=True, kw_only=True):
    """Shares of devices, and of the host's RAM and CPUs, that are proposed for a need, before the ledger grants them.
    A claim of neither takes no lease. In place of a lease's shares, a claim without `host` leaves the lease's as is."""

    shares: tuple[Share, ...]
    host: HostShare | None = None

    @property
    def takes_lease(self) -> bool:
        return bool(self.shares) or self.host is not None


class Holder(Struct, frozen=True, kw_only=True):
    """The process behind a lease or a ticket. Its user is the owner of the file, whatever the file's content says.
    `machine` is the name of the machine it runs on, and `boot_id` the name of that machine's present start."""

    uid: int
    user: str
    pid: int
    pid_started: float | None = None
    boot_id: str | None = None
    machine: str | None = None
    label: str | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """Granted shares. They belong to the holder until it releases them or dies."""

    id: str
    holder: Holder
    shares: tuple[Share, ...]
    since: float
    host: HostShare | None = None

    def on(self, device_id: str) -> Share | None:
        return next((share for share in self.shares if share.device_id == device_id), None)


def amended(lease: Lease, claim: Claim) -> Lease:
    """Return the lease with the shares of the claim, and with its share of the host if it has one."""
    return replace(lease, shares=claim.shares, host=claim.host or lease.host)


class Ticket(Struct, frozen=True, kw_only=True):
    """A waiting request. `is_idle`: its process has not shown for a while that it runs; it may be stopped."""

    id: str
    holder: Holder
    need: Need
    since: float
    priority: int = 0
    is_idle: bool = False


class Drain(Struct, frozen=True, kw_only=True):
    """A user's order that nothing new starts on a device. `since` is in wall time."""

    device_id: str
    uid: int
    user: str
    since: float
    reason: str = ""
