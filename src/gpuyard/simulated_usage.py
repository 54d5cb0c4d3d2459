"""The use of simulated devices by real processes, as files in a shared directory.

Each process has one file and keeps it locked while it lives, so its share is free as soon as it dies. All reads and
changes happen under one briefly held lock, so two processes never get the same memory.

Another process of the same user can suspend a share, as a driver suspends a real process: it locks the share (from then
on its owner waits at every call), moves its memory off the device and remembers it, and later moves it back. A share
that is restored while too little memory is free is ruined for good.

`GPUYARD_SIMULATE=8x80GB:links=0-3,4-7:nodes=0-3,4-7` names the devices, groups of them that NVLink joins, and the NUMA
nodes, in order. Devices are counted from 0 through the whole text; `+` puts several numbers or ranges into one group,
as in `0-1+6-7`."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.model.units import parse_size
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.file_locks import lock

# Memory that is taken in many small steps adds up to slightly more or less than the total.
ROUNDING_MB = 0.001
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class SimulatedShare(Struct, frozen=True, kw_only=True):
    """The use of one process, by device id. `suspended_mb` is its memory while it is suspended. `pid` is its number in
    `namespace`, the inode of its PID namespace; 0 if that is the reader's."""

    pid: int
    namespace: int = 0
    memory_mb: dict[str, float] = {}
    load_percent: dict[str, float] = {}
    suspended_mb: dict[str, float] = {}
    is_locked: bool = False
    is_suspended: bool = False
    is_ruined: bool = False


class SharesFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder. No file in it is locked, as a user who made it could replace it."""
        try:
            descriptor = os.open(self.path, _FOLDER)
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, _FOLDER)
        try:
            lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def add(self, share: SimulatedShare) -> int:
        """Add a share and return the descriptor of its file, which the owner keeps open. Call it while locked."""
        path = self.path / f"{share.pid}-{os.urandom(4).hex()}.share"
        descriptor = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CREAT | os.O_CLOEXEC, 0o600)
        owner_locks.try_hold(descriptor)  # no other user can open the file yet
        write(descriptor, share)
        os.fchmod(descriptor, 0o644)  # others have to see what this process uses, whatever our umask
        return descriptor

    def live(self) -> dict[Path, SimulatedShare]:
        """Return the shares of live processes, and remove those of dead processes. Call it while locked. A file that is
        not a valid share is ignored: it may be another user's."""
        found: dict[Path, SimulatedShare] = {}
        for path in self.path.glob("*.share"):
            try:
                # The folder may be shared: another user's link is not followed, and another user's pipe does not block.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:  # a link, a pipe or a socket, among others
                if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
                    continue
                raise
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    continue
                if owner_locks.is_held(descriptor):
                    if (share := read(descriptor)) is not None:
                        found[path] = _as_seen_here(share)
                    continue
                with contextlib.suppress(PermissionError, FileNotFoundError):
                    path.unlink()  # in a sticky directory another user's stays
            finally:
                os.close(descriptor)
        return found


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _as_seen_here(share: SimulatedShare) -> SimulatedShare:
    """Return the share with the pid that its process has here, as a driver reports it. Processes in containers have
    other pids; a process that is not found, such as another user's, keeps its number."""
    if share.namespace in (0, pid_namespace()):
        return share
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, StopIteration):
            if os.stat(f"/proc/{name}/ns/pid").st_ino == share.namespace:
                lines = Path(f"/proc/{name}/status").read_text(encoding="ascii", errors="replace").splitlines()
                if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == str(share.pid):
                    return replace(share, pid=int(name), namespace=pid_namespace())
    return share


def read(descriptor: int) -> SimulatedShare | None:
    """Return the share in a file, or None if the content is not one."""
    try:
        share = msgspec.json.decode(os.pread(descriptor, 65536, 0), type=SimulatedShare)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    figures = (*share.memory_mb.values(), *share.load_percent.values(), *share.suspended_mb.values())
    is_valid = 0 < share.pid <= 1 << 22 and all(0.0 <= figure <= 1e9 for figure in figures)
    return share if is_valid else None


def write(descriptor: int, share: SimulatedShare) -> None:
    """Write in one call that never shortens the file: a process killed here leaves the old share or the new one."""
    os.pwrite(descriptor, msgspec.json.encode(share).ljust(os.fstat(descriptor).st_size), 0)


def free_mb(device: Device, shares: Iterable[SimulatedShare]) -> float:
    used = sum((share.memory_mb.get(device.id, 0.0) for share in shares), 0.0)
    return max(0.0, round((device.memory_total_mb or 0.0) - used, 3))


def out_of_memory_message(device: Device, asked_mb: float, free_mb: float) -> str:
    """Return the message that PyTorch would print."""
    total_mb = device.memory_total_mb or 0.0
    return (
        f"CUDA out of memory. Tried to allocate {asked_mb / 1024:.2f} GiB. GPU {device.index} has a total capacity of "
        f"{total_mb / 1024:.2f} GiB of which {free_mb / 1024:.2f} GiB is free."
    )


def parse_devices(spec: str) -> tuple[Device, ...]:
    """Return idle devices for a text such as `1x80GB,2x24GB`, which gives three. With vendors, as in
    `nvidia:2x24GB,amd-integrated:1x2GB`, the devices pass for those of these vendors; links are `parse_topology`'s."""
    hint = "write it as 2x24GB, 1x80GB,2x24GB or nvidia:1x24GB,amd-integrated:1x2GB"
    pattern = r"(?:(nvidia|amd|intel|apple)(-integrated)?:)?(\d{1,4})\s*x\s*(\d.*[a-z])"
    devices: list[Device] = []
    described, _ = split_spec(spec)
    for group in described.split(","):
        match = re.fullmatch(pattern, group.strip(), re.IGNORECASE | re.ASCII)
        if match is None or int(match[3]) < 1:
            raise UserError(f"'{spec}' does not describe simulated devices", hint=hint)
        vendor = Vendor(match[1].lower()) if match[1] else Vendor.SIMULATED
        first = sum(device.vendor is vendor for device in devices)
        prefix = "SIM-" if vendor is Vendor.SIMULATED else f"SIM-{vendor}-"
        size = parse_size(match[4])
        if size <= 0:
            raise UserError(f"'{spec}' describes a device without memory", hint=hint)
        devices += (
            Device(
                id=f"{prefix}{index}",
                vendor=vendor,
                index=index,
                name=f"Simulated {size / 1024:g} GB",
                memory_total_mb=size,
                is_integrated=match[2] is not None,
            )
            for index in range(first, first + int(match[3]))
        )
    return tuple(devices)


_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_EXAMPLE = "write it as 8x80GB:links=0-3,4-7 or 8x80GB:links=0-3,4-7:nodes=0-3,4-7"
_KEYS = ("links", "nodes")


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Return the text of the devices, and the texts of `links` and `nodes`, as far as they are there."""
    first = re.search(r":\s*\w+\s*=", spec, re.ASCII)
    if first is None:
        return spec, {}
    found: dict[str, str] = {}
    for part in spec[first.start() + 1 :].split(":"):
        key, equals, groups = (text.strip() for text in part.partition("="))
        if not equals or key not in _KEYS:
            raise UserError(f"'{part}' says nothing about simulated devices", hint=_EXAMPLE)
        if key in found:
            raise UserError(f"'{spec}' has {key} twice", hint="put all groups into one, separated by commas")
        found[key] = groups
    return spec[: first.start()], found


def parse_topology(spec: str, devices: Sequence[Device]) -> Topology:
    """Return the links and NUMA nodes that the text gives to the devices."""
    _, texts = split_spec(spec)
    linked, nodes = (_groups(key, texts.get(key), devices) for key in _KEYS)
    by_id = {device.id: node for node, group in enumerate(nodes) for device in group}
    by_node = Topology(links=tuple(link_by_nodes([device.id for device in devices], by_id)), nodes=by_id)
    links = tuple(_join(one, other) for group in linked for one, other in combinations(group, 2))
    return merge(by_node, Topology(links=links))


def _join(one: Device, other: Device) -> Link:
    if one.vendor is not other.vendor:
        raise UserError(f"links join {one.id} and {other.id}, GPUs of two vendors", hint=_EXAMPLE)
    if one.vendor is Vendor.AMD:
        return Link(one=one.id, other=other.id, kind=LinkKind.XGMI)
    # As many as an A100 has to each NVSwitch, or to its neighbour.
    return Link(one=one.id, other=other.id, kind=LinkKind.NVLINK, count=12)


def _groups(key: str, text: str | None, devices: Sequence[Device]) -> list[list[Device]]:
    if text is None:
        return []
    groups, taken = [], set()
    for group in text.split(","):
        numbers = [number for span in group.split("+") for number in _numbers(key, span.strip(), len(devices))]
        for number in numbers:
            if number in taken:
                raise UserError(f"GPU {number} is in {key} twice", hint="a simulated GPU is in one group")
            taken.add(number)
        groups.append([devices[number] for number in numbers])
    return groups


def _numbers(key: str, span: str, count: int) -> range:
    match = _SPAN.fullmatch(span)
    if match is None:
        raise UserError(f"'{span}' in {key}= is no GPU and no range of GPUs", hint=_EXAMPLE)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"'{span}' in {key}= is an empty range", hint=_EXAMPLE)
    if last >= count:
        raise UserError(
            f"{key}= names GPU {last}, and there are {count} simulated GPUs", hint=f"they are numbered 0 to {count - 1}"
        )
    return range(first, last + 1)
