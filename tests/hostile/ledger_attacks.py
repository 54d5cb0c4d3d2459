"""What the attacks on a shared ledger have in common: Ben's files in it, and what Anne gets from it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import prepare_directory
from gpuyard.ledger.lock_file import LockFile
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.policy.placement import in_queue_order
from tests.hostile.users import ANNE, BEN, act_as, stay_as
from tests.unit.ledger import Child, child

_kept: list[LockFile] = []


def record(shares: object = None, *, need: object = None, priority: object = 0, **holder: object) -> bytes:
    """Return the content of a lease, or of a ticket where `need` is given. The fields may have any values."""
    content: dict[str, object] = {"holder": {"uid": BEN, "user": "ben", "pid": 1, **holder}}
    content |= {"shares": shares or []} if need is None else {"need": need, "priority": priority}
    return json.dumps(content).encode()


def hold_files(folder: str, files: list[tuple[str, bytes]]) -> int:
    """As Ben: make files in the ledger and keep them locked. Return this process's pid."""
    _kept.extend(LockFile(f"{folder}/{name}", content) for name, content in files)
    return os.getpid()


@contextlib.contextmanager
def ben_holds(folder: Path, *files: tuple[str, bytes]) -> Iterator[Child]:
    """Yield a live process of Ben that holds these files."""
    with child(stay_as, BEN, hold_files, str(folder), list(files)) as ben:
        ben.receive()
        yield ben


def two_gpus() -> Snapshot:
    devices = (
        Device(
            id=f"G{number}",
            vendor=Vendor.NVIDIA,
            index=number,
            memory_total_mb=24576.0,
            memory_used_mb=0.0,
            memory_free_mb=24576.0,
            processes=(),
        )
        for number in range(2)
    )
    return Snapshot(taken_at=time.time(), host=Host(), devices=tuple(devices))


def lease_gpus(folder: str, count: int, vram_mb: float | None = None) -> list[str] | None:
    """Return the GPUs that this user gets at once, or None."""
    need = Need(devices=count) if vram_mb is None else Need(devices=count, memory=FixedMemory(vram_mb))
    lease = Acquisition(Ledger(prepare_directory(Path(folder))), two_gpus, need).attempt()
    if lease is None:
        return None
    devices = [share.device_id for share in lease.lease.shares]
    lease.release()
    return devices


def anne_gets(folder: Path, count: int = 2, vram_mb: float | None = None) -> list[str] | None:
    gpus: list[str] | None = act_as(ANNE, lease_gpus, str(folder), count, vram_mb)
    return gpus


def ticket_order(folder: Path) -> list[int]:
    """Return the users of all tickets, in the order in which they are served."""
    return [ticket.holder.uid for ticket in in_queue_order(Ledger(folder).contents().tickets)]


def gpuyard(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of the victim (root)."""
    command = [sys.executable, "-m", "gpuyard", *arguments]
    return subprocess.run(command, capture_output=True, timeout=90, check=False, env={**os.environ, **environment})


def ignored(**environment: str) -> list[dict[str, Any]]:
    """Return the records that `gpuyard leases` names as ignored."""
    listed: list[dict[str, Any]] = json.loads(gpuyard("leases", "--json", **environment).stdout)["ignored"]
    return listed
