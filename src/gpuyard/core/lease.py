"""Needs, claims, leases and tickets: the devices that work asks for, and the devices that it is granted."""

from msgspec import Struct

from gpuyard.core.snapshot import Vendor


class Need(Struct, frozen=True, kw_only=True):
    """The devices that a piece of work asks for: how many, exclusive or shared, and under which conditions.

    A limit that is None does not apply. A limit whose figure no probe can read counts as met.

    memory_mb: on each device, what a shared lease reserves, or what must be free for an exclusive one.
    load_percent: how busy the work is known to keep a device.
    part: the part of a device to reserve where the needed memory is unknown.
    takes_rest: reserve all free memory, at least `memory_mb`, because the memory that the work will use is unknown.
    ignores_load: share a device however busy its leases keep it; the user has set how many jobs may share it.
    ignores_foreign_load: share a device however busy foreign processes keep it; the work has a limit of its own.
    model: a part of the device's name.
    """

    devices: int = 1
    memory_mb: float | None = None
    load_percent: float | None = None
    part: float | None = None
    is_exclusive: bool = True
    takes_rest: bool = False
    ignores_load: bool = False
    ignores_foreign_load: bool = False
    only: tuple[str, ...] | None = None
    banned: tuple[str, ...] = ()
    vendor: Vendor | None = None
    model: str | None = None
    max_utilization_percent: float | None = None
    max_power_w: float | None = None
    max_memory_used_mb: float | None = None
    max_cpu_percent: float | None = None
    min_host_memory_mb: float | None = None
    ignores_health: bool = False

    @property
    def limits_device_load(self) -> bool:
        limits = (self.max_utilization_percent, self.max_power_w, self.max_memory_used_mb)
        return any(limit is not None for limit in limits)


class Share(Struct, frozen=True, kw_only=True):
    """A whole device, or a part of its memory. An exclusive share need not say how much memory it will use.

    `foreign_mb` is the memory that foreign processes held when the share was granted. It is recorded where the driver
    lists no processes: memory in use beyond it belongs to the leases.
    """

    device_id: str
    memory_mb: float | None = None
    load_percent: float | None = None
    is_exclusive: bool = True
    foreign_mb: float | None = None


class Claim(Struct, frozen=True, kw_only=True):
    """Shares of devices that are proposed for a need, before the ledger grants them."""

    shares: tuple[Share, ...]


class Holder(Struct, frozen=True, kw_only=True):
    """The process behind a lease or a ticket. Its user is the owner of the file, whatever the file's content says."""

    uid: int
    user: str
    pid: int
    pid_started: float | None = None
    boot_id: str | None = None
    label: str | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """Granted shares. They belong to the holder until it releases them or dies."""

    id: str
    holder: Holder
    shares: tuple[Share, ...]
    since: float

    def on(self, device_id: str) -> Share | None:
        return next((share for share in self.shares if share.device_id == device_id), None)


class Ticket(Struct, frozen=True, kw_only=True):
    """A place in the ledger's queue."""

    id: str
    holder: Holder
    need: Need
    since: float
    priority: int = 0
