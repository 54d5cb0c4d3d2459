"""What a machine looks like at one moment: a Snapshot of its host and its devices.

Rules:
- Unknown is `None`, never zero. `processes` is `None` where they cannot be listed and empty where there are none.
- Memory is in MB of 1,048,576 bytes, the unit that vendors' tools print; power in W, temperature in °C.
- The memory of an integrated GPU (Apple silicon, NVIDIA's GB10 and Jetson) is the host's, or the share that it may use.
- A device's `id` names it for ever (a UUID where the vendor has one); its `index` is its vendor's number for people.
- A part of a card (a MIG instance, an AMD partition) is a device of its own whose `parent` is the card's id.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct


class Vendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    APPLE = "apple"
    SIMULATED = "simulated"


class Process(Struct, frozen=True, kw_only=True):
    """A process that uses a device, how much of its memory it holds, and how busy it keeps it."""

    pid: int
    memory_mb: float | None = None
    name: str | None = None
    utilization_percent: float | None = None


# A driver keeps less than this of a device for itself.
_UNEXPLAINED_MB = 1024.0


class Device(Struct, frozen=True, kw_only=True):
    id: str
    vendor: Vendor
    index: int | None = None
    name: str | None = None
    parent: str | None = None
    pci_bus_id: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_free_mb: float | None = None
    utilization_percent: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    processes: tuple[Process, ...] | None = None
    fault: str | None = None

    @property
    def healthy(self) -> bool:
        return self.fault is None

    @property
    def hides_processes(self) -> bool:
        """Whether processes use the device that the driver does not list, as in containers."""
        return not self.processes and (self.processes is None or (self.memory_used_mb or 0.0) > _UNEXPLAINED_MB)


class Host(Struct, frozen=True, kw_only=True):
    """The machine around the devices, within the limits of the container we run in, if any."""

    name: str | None = None
    cpu_count: float | None = None
    cpu_percent: float | None = None
    memory_total_mb: float | None = None
    memory_available_mb: float | None = None
    load_1m: float | None = None
    load_5m: float | None = None
    load_15m: float | None = None
    limited_by: str | None = None


class Problem(Struct, frozen=True, kw_only=True):
    """Something that kept a probe from answering: what, why, and what to try."""

    source: str
    kind: str
    message: str
    hint: str | None = None
    vendor: Vendor | None = None

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.source}: {self.message}{hint}"


class Reading(Struct, frozen=True, kw_only=True):
    """What one probe saw, and what it could not see."""

    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()


class Snapshot(Struct, frozen=True, kw_only=True):
    """`taken_at` is in seconds since the epoch; `None` where a saved output does not tell."""

    taken_at: float | None
    host: Host
    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()

    def device(self, device_id: str) -> Device | None:
        return next((device for device in self.devices if device.id == device_id), None)

    def usable_devices(self) -> tuple[Device, ...]:
        """Those that work can be placed on: healthy, and not a card that is split into parts."""
        split = {device.parent for device in self.devices}
        return tuple(device for device in self.devices if device.healthy and device.id not in split)


def fresh_problems(before: Sequence[Problem], now: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems that were not there before, so that each is told once and not at every sample."""
    known = {(problem.source, problem.kind, problem.vendor) for problem in before}
    return tuple(problem for problem in now if (problem.source, problem.kind, problem.vendor) not in known)


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
