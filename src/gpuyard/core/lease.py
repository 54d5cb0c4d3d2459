"""Needs, claims, leases and tickets: what work asks for on devices, and what it is granted."""

from msgspec import Struct

from gpuyard.core.snapshot import Vendor


class Need(Struct, frozen=True, kw_only=True):
    """What a piece of work asks for: so many devices, alone on each or beside others, under which conditions.

    `memory_mb` is on each device: what a shared lease reserves, and what must be free for an exclusive one. A bound
    that is `None` does not apply, and one whose figure is unknown is passed: what nobody can read keeps nobody waiting.
    One that `takes_rest` needs at least that much, and reserves all that is free: nobody knows what it will use.
    `load_percent` is how busy it is known to keep a device, and `model` a part of the device's name. `part` is how much
    of a device it is to be given where nobody knows how much it needs; one that `ignores_load` goes beside others
    however busy they keep a device: a person has said how many may share it. One that `ignores_foreign_load` goes
    beside processes without a lease however busy they keep it: it has a bound of its own.
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
    def bounds_load(self) -> bool:
        bounds = (self.max_utilization_percent, self.max_power_w, self.max_memory_used_mb)
        return any(bound is not None for bound in bounds)


class Share(Struct, frozen=True, kw_only=True):
    """A device, or so much of its memory; an exclusive share may leave open how much it will use.

    `foreign_mb` is what processes without a lease held there when it was granted. It is kept where the driver lists no
    processes: what is in use beyond it is what the leases use.
    """

    device_id: str
    memory_mb: float | None = None
    load_percent: float | None = None
    is_exclusive: bool = True
    foreign_mb: float | None = None


class Claim(Struct, frozen=True, kw_only=True):
    """Proposed: these devices, for somebody who needs them."""

    shares: tuple[Share, ...]


class Holder(Struct, frozen=True, kw_only=True):
    """Who is behind a lease or a ticket: the user is whoever owns its file, whatever it says inside."""

    uid: int
    user: str
    pid: int
    pid_started: float | None = None
    boot_id: str | None = None
    label: str | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """Granted: the shares are the holder's until it lets go or dies."""

    id: str
    holder: Holder
    shares: tuple[Share, ...]
    since: float

    def on(self, device_id: str) -> Share | None:
        return next((share for share in self.shares if share.device_id == device_id), None)


class Ticket(Struct, frozen=True, kw_only=True):
    """A place in the line of those who wait."""

    id: str
    holder: Holder
    need: Need
    since: float
    priority: int = 0
