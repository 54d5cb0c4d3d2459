"""The CPUs and the limit of RAM of a launch: only if they are configured, and beside those of live attempts."""

from msgspec.structs import replace

from gpuyard.config import HostConfig
from gpuyard.model.job import Attempt, Started
from gpuyard.model.lease import HostShare, Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.policy.host_room import CpuLayout
from gpuyard.queue.launch_jobs import CpuPinning, launch_of
from gpuyard.queue.transitions import JobTransitions
from tests.simulation.simulated_daemon import RULES
from tests.unit.store import QueueDb

LAYOUT = CpuLayout(allowed=frozenset(range(8)), nodes={0: frozenset(range(4)), 1: frozenset(range(4, 8))})
MACHINE = Snapshot(taken_at=0.0, host=Host())
PINNED = replace(RULES, host=HostConfig(pin_cpus=True, enforce_ram=True))
ON_NODE_1 = Device(id="G1", vendor=Vendor.NVIDIA, pci_bus_id="0000:3b:00.0")


def pinning(queue_db: QueueDb) -> CpuPinning:
    transitions = JobTransitions(queue_db.store)
    transitions.reload()
    return CpuPinning(transitions, lambda: LAYOUT, lambda device: 1 if device is ON_NODE_1 else None)


def start(queue_db: QueueDb, cpus: tuple[int, ...], engine: str = "", declared: int | None = 2) -> None:
    (job_id,) = queue_db.add(need=Need(devices=0), cpus=declared)
    phase = Started(at=1.0, keeper_pid=9)
    queue_db.store.start_attempt(Attempt(job_id=job_id, number=1, phase=phase, boot_id="b", cpus=cpus, engine=engine))


def test_cpus_of_live_attempts_are_taken_also_for_a_new_daemon(queue_db: QueueDb) -> None:
    start(queue_db, (4, 5))
    start(queue_db, (6, 7), engine="slurm")
    start(queue_db, (0, 1, 2, 3, 6, 7), declared=None)
    (job_id,) = queue_db.add(cpus=2)
    job = queue_db.job(job_id)
    assert pinning(queue_db).cpus_for(job, [ON_NODE_1]) == (6, 7)
    (undeclared,) = queue_db.add()
    assert pinning(queue_db).cpus_for(queue_db.job(undeclared), []) == (0, 1, 2, 3, 6, 7)


def test_cpus_and_limits_are_part_of_a_launch_only_if_they_are_configured(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add(need=Need(devices=0, host=HostShare(ram_mb=512.0)), cpus=2)
    job, own = queue_db.job(job_id), pinning(queue_db)
    plain = launch_of(job, 1, None, MACHINE, RULES, pinning=own)
    assert (plain.cpus, plain.ram_limit_mb) == ((), None)
    limited = launch_of(job, 1, None, MACHINE, PINNED, pinning=own)
    assert (limited.cpus, limited.ram_limit_mb) == ((0, 1), 512.0)
