"""The state of a machine at one moment: a Snapshot of its host and its devices.

- Unknown is `None`, never zero. `processes` is `None` where they cannot be listed and empty where there are none.
- Memory is in MB of 1,048,576 bytes, power in W, temperature in °C. The memory of an integrated GPU is the host's.
- A device's `id` never changes; its `index` is the vendor's number, and its label, such as `amd:0`, is unique on the
  machine. A part of a card (a MIG instance, an AMD partition) is a device of its own whose `parent` is the card's id.
- As JSON for scripts, keys are only ever added.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, overload

from msgspec import Struct, to_builtins

from gpuyard.model.topology import Topology


class Throttle(StrEnum):
    """Why a device runs slower than it could, as far as that is not normal: heat, or the brake of the power supply."""

    SW_THERMAL = "sw-thermal"
    HW_THERMAL = "hw-thermal"
    POWER_BRAKE = "power-brake"
    HW_SLOWDOWN = "hw-slowdown"


class IssueKind(StrEnum):
    LOST = "lost"
    XID = "xid"
    ECC = "ecc"
    REMAP_FAILED = "remap-failed"
    REMAP_PENDING = "remap-pending"
    LINK = "link"
    THROTTLED = "throttled"
    UNRELEASED = "unreleased-memory"


class XidEvent(Struct, frozen=True, kw_only=True):
    """An error that NVIDIA's driver reported by its number, and when this process learned of it."""

    code: int
    at: float


class HealthFigures(Struct, frozen=True, kw_only=True):
    """What drivers say about a device. `ecc_uncorrected` counts since the driver was loaded. `link_width` is in lanes:
    of a narrow link only while the device is busy, as an idle one may save power."""

    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle: tuple[Throttle, ...] | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    unreleased_mb: float | None = None  # in use although no process is left
    xids: tuple[XidEvent, ...] = ()  # those that this process has seen
    is_lost: bool = False  # the driver itself says that the device is gone or needs a reset

    @property
    def has_narrow_link(self) -> bool:
        width, most = self.link_width, self.link_width_max
        return width is not None and most is not None and width < most


class HealthMark(Struct, frozen=True, kw_only=True):
    """In the ledger: a daemon saw a fault of this `kind`, or a user cleared the device with what it `accepted`."""

    device_id: str
    since: float
    kind: IssueKind | None = None
    xid: int | None = None
    accepted: HealthFigures | None = None
    uid: int = 0
    user: str = ""


class Vendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    APPLE = "apple"
    SIMULATED = "simulated"


class Process(Struct, frozen=True, kw_only=True):
    """A process on a device: the device memory that it holds, and how busy it keeps the device."""

    pid: int
    memory_mb: float | None = None
    name: str | None = None
    utilization_percent: float | None = None


# A driver uses less memory of a device than this for itself.
UNEXPLAINED_MB = 1024.0


class Device(Struct, frozen=True, kw_only=True):
    id: str
    vendor: Vendor
    index: int | None = None
    name: str | None = None
    parent: str | None = None
    pci_bus_id: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_used_at_least_mb: float | None = None  # where the used memory is unknown
    memory_free_mb: float | None = None
    utilization_percent: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded, by the counter of the card
    temperature_c: float | None = None
    processes: tuple[Process, ...] | None = None
    fault: str | None = None
    is_integrated: bool = False
    health: HealthFigures | None = None

    @property
    def is_simulated(self) -> bool:
        return self.id.startswith("SIM-")

    @property
    def known_used_mb(self) -> float | None:
        """The used memory, or a lower bound of it."""
        return self.memory_used_at_least_mb if self.memory_used_mb is None else self.memory_used_mb

    @property
    def healthy(self) -> bool:
        return self.fault is None

    @property
    def is_last_choice(self) -> bool:
        """Whether it is slower than it could be, or keeps memory in use, so that work goes to other devices first."""
        health = self.health
        return health is not None and (
            bool(health.throttle) or health.has_narrow_link or health.unreleased_mb is not None
        )

    @property
    def hides_processes(self) -> bool:
        """Whether the driver does not list all processes that use the device, as in containers."""
        return not self.processes and (self.processes is None or (self.memory_used_mb or 0.0) > UNEXPLAINED_MB)


class Host(Struct, frozen=True, kw_only=True):
    """The machine around the devices, within the limits of our container, if there is one."""

    name: str | None = None
    cpu_count: float | None = None
    cpu_percent: float | None = None
    memory_total_mb: float | None = None
    memory_available_mb: float | None = None
    load_1m: float | None = None
    load_5m: float | None = None
    load_15m: float | None = None
    limited_by: str | None = None

    @property
    def memory_used_mb(self) -> float | None:
        total, free = self.memory_total_mb, self.memory_available_mb
        return None if total is None or free is None else round(max(0.0, total - free), 2)


class Problem(Struct, frozen=True, kw_only=True):
    """Why a probe could not read its devices, and what to try."""

    source: str
    kind: str
    message: str
    hint: str | None = None
    vendor: Vendor | None = None

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.source}: {self.message}{hint}"

    @property
    def sentence(self) -> str:
        """What happened, such as `nvidia-smi did not answer within 1.7 s`."""
        if self.message.startswith("no answer "):
            return f"{self.source} did not answer {self.message.removeprefix('no answer ')}"
        return f"{self.source}: {self.message}"


class Reading(Struct, frozen=True, kw_only=True):
    """The devices that one probe read, and the problems that it met."""

    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()


class Snapshot(Struct, frozen=True, kw_only=True, dict=True):
    """`taken_at` is in seconds since the epoch; `topology` is read once for each set of devices."""

    taken_at: float | None
    host: Host
    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()
    topology: Topology = Topology()

    @cached_property
    def is_mixed(self) -> bool:
        """Whether devices of more than one vendor are listed."""
        return len({device.vendor for device in self.devices}) > 1

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """The label of each device by id: `0`; `0:1` for a part of card 0; with several vendors `amd:0`."""
        numbers = {device.id: "?" if device.index is None else str(device.index) for device in self.devices}
        labels = {}
        for device in self.devices:
            vendor = (device.vendor.value,) if self.is_mixed else ()
            card = (numbers[device.parent],) if device.parent in numbers else ()
            if device.index is not None:
                labels[device.id] = ":".join((*vendor, *card, numbers[device.id]))
        return labels

    def label(self, device_id: str) -> str:
        """Return the device's label, or its id if it has none."""
        return self.labels.get(device_id, device_id)

    @cached_property
    def hiding(self) -> frozenset[str]:
        """The devices whose driver does not list all processes."""
        return frozenset([device.id for device in self.devices if not device.processes and device.hides_processes])

    @cached_property
    def silent(self) -> tuple[Problem, ...]:
        """The problems of probes that did not answer in time, of vendors without a usable device."""
        read = {device.vendor for device in self.usable_devices()}
        return tuple(each for each in self.problems if each.kind == "timeout" and each.vendor not in read)

    @cached_property
    def _by_id(self) -> Mapping[str, Device]:
        return {device.id: device for device in reversed(self.devices)}

    def device(self, device_id: str) -> Device | None:
        return self._by_id.get(device_id)

    def usable_devices(self) -> tuple[Device, ...]:
        """Return the devices that can run jobs: healthy, and not a card that is split into parts."""
        return tuple([device for device in self.unsplit_devices() if device.fault is None])

    def unsplit_devices(self) -> tuple[Device, ...]:
        """Return all devices but cards that are split into parts."""
        split = {device.parent for device in self.devices}
        return tuple([device for device in self.devices if device.id not in split])


# In `Sample.reread`: the RAM of the host.
HOST_RAM = "host-ram"


class Sample(Struct, frozen=True, kw_only=True):
    """A snapshot (raw) with smoothed figures. Those of attempts, by (job id, attempt number), only the daemon has."""

    snapshot: Snapshot
    cpu_percent: float | None = None
    loads: Mapping[str, float | None] = {}  # percent, by device id
    powers_w: Mapping[str, float | None] = {}
    new_problems: tuple[Problem, ...] = ()  # which the sample before did not have
    ram_mb: Mapping[tuple[int, int], float] = {}  # what the processes of each live attempt hold
    cpu_s: Mapping[tuple[int, int], float] = {}  # the CPU time that they have used since they started
    # The devices whose memory and processes, and nothing else, were read again since; with HOST_RAM, the available RAM.
    reread: frozenset[str] = frozenset()


def find_new_problems(before: Sequence[Problem], now: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the problems that are not in `before`, so that each is reported once and not with every sample."""
    known = {(problem.source, problem.kind, problem.vendor) for problem in before}
    return tuple(problem for problem in now if (problem.source, problem.kind, problem.vendor) not in known)


def snapshot_as_dict(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "taken_at": iso_time(snapshot.taken_at),
        "host": to_builtins(snapshot.host),
        "devices": [{**device_as_dict(device), "label": snapshot.labels.get(device.id)} for device in snapshot.devices],
        "problems": to_builtins(list(snapshot.problems)),
    }


def device_as_dict(device: Device) -> dict[str, Any]:
    return {**to_builtins(device), "healthy": device.healthy}


@overload
def iso_time(seconds: float) -> str: ...


@overload
def iso_time(seconds: float | None) -> str | None: ...


def iso_time(seconds: float | None) -> str | None:
    """Return the time in UTC, with milliseconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
