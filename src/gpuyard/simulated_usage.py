"""What real processes take of simulated devices, as files that all who share a folder see.

Each process has one file, and keeps it locked: held means alive, so however a process dies, its share is free at once.
All reading and changing happens under one short lock, so that two processes never get the same memory.

A share can be suspended by another process of the same user, as a driver does it with a real one: locked first (from
then on its owner waits at every call), then its memory leaves the device and is remembered, then the way back. One that
was put back where there was no room is ruined for ever.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.core.snapshot import Device, Vendor
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError

# What is taken in many small steps adds up to a little more or less than the whole.
ROUNDING_MB = 0.001
_GROUP = re.compile(r"(\d{1,4})\s*x\s*(\d.*[a-z])", re.IGNORECASE | re.ASCII)
_LARGEST_FILE = 65536


class SimulatedShare(Struct, frozen=True, kw_only=True):
    """What one process takes, by device id; `suspended_mb` is what it took, and waits in host memory to be put back."""

    pid: int
    memory_mb: dict[str, float] = {}
    load_percent: dict[str, float] = {}
    suspended_mb: dict[str, float] = {}
    is_locked: bool = False
    is_suspended: bool = False
    is_ruined: bool = False


class SharesFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_path = path / "lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        descriptor = self._open_lock()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        try:
            # Without O_CREAT first: in a sticky folder the kernel may refuse that on another user's file.
            return os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            return _open_for_all(self.lock_path, os.O_RDONLY)

    def add(self, share: SimulatedShare) -> int:
        """The file of a new one, for its owner to keep open. Only while locked."""
        path = self.path / f"{share.pid}-{os.urandom(4).hex()}.share"
        descriptor = _open_for_all(path, os.O_RDWR | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        write(descriptor, share)
        return descriptor

    def live(self) -> dict[Path, SimulatedShare]:
        """Those of living processes; what the dead left behind is cleared away. Only while locked."""
        found: dict[Path, SimulatedShare] = {}
        for path in self.path.glob("*.share"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found[path] = read(descriptor)
            else:
                with contextlib.suppress(PermissionError):  # another user's, in a sticky folder
                    path.unlink()
            finally:
                os.close(descriptor)
        return found


def read(descriptor: int) -> SimulatedShare:
    return msgspec.json.decode(os.pread(descriptor, _LARGEST_FILE, 0), type=SimulatedShare)


def write(descriptor: int, share: SimulatedShare) -> None:
    """In one call and never shorter than before, so that whoever is killed here leaves the old share or the new one."""
    os.pwrite(descriptor, msgspec.json.encode(share).ljust(os.fstat(descriptor).st_size), 0)


def free_mb(device: Device, shares: Iterable[SimulatedShare]) -> float:
    used = sum((share.memory_mb.get(device.id, 0.0) for share in shares), 0.0)
    return max(0.0, round((device.memory_total_mb or 0.0) - used, 3))


def parse_devices(spec: str) -> tuple[Device, ...]:
    """`1x80GB,2x24GB` as three devices with nothing on them."""
    sizes: list[float] = []
    for group in spec.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None or int(match[1]) < 1:
            raise UserError(f"'{spec}' does not describe simulated devices", hint="write it as 2x24GB or 1x80GB,2x24GB")
        sizes += [parse_size(match[2])] * int(match[1])
    if min(sizes) <= 0:
        raise UserError(f"'{spec}' describes a device without memory", hint="write it as 2x24GB")
    return tuple(
        Device(
            id=f"SIM-{index}",
            vendor=Vendor.SIMULATED,
            index=index,
            name=f"Simulated {size / 1024:g} GB",
            memory_total_mb=size,
        )
        for index, size in enumerate(sizes)
    )


def _open_for_all(path: Path, flags: int) -> int:
    """A new file that every user may read, whatever our umask: others have to see what we take."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.fchmod(descriptor, 0o644)
    return descriptor
