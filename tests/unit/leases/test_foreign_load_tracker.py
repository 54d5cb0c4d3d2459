"""The load of foreign processes over several samples. This process plays the foreign process."""

import getpass
import os

from gpuyard.core.lease import Lease, Share
from gpuyard.core.snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.leases.foreign_load_tracker import ForeignLoadTracker
from gpuyard.system.process_identity import this_process

ELSEWHERE = 2**22 + 7  # higher than any pid of this machine


def snapshot(*pids: int, percent: float = 90.0) -> Snapshot:
    device = Device(
        id="G0",
        vendor=Vendor.NVIDIA,
        memory_used_mb=2048.0,
        utilization_percent=percent,
        processes=tuple(Process(pid=pid) for pid in pids),
    )
    return Snapshot(taken_at=0.0, host=Host(), devices=(device,))


def lease(load_percent: float | None = None, pid: int | None = None) -> Lease:
    holder = this_process(None)
    share = Share(device_id="G0", memory_mb=1024.0, load_percent=load_percent, is_exclusive=False)
    if pid is not None:
        holder = type(holder)(uid=holder.uid, user=holder.user, pid=pid)
    return Lease(id="a", holder=holder, shares=(share,), since=0.0)


def percent(loads: ForeignLoadTracker, sample: Snapshot, *leases: Lease, now: float = 0.0) -> float:
    return loads.update(sample, leases, now, 50.0)["G0"].percent


def test_a_process_without_a_lease_is_named_with_its_user() -> None:
    load = ForeignLoadTracker().update(snapshot(os.getpid()), (), 0.0, 50.0)["G0"]
    assert (load.percent, load.is_over) == (90.0, True)
    (foreign,) = load.processes
    assert (foreign.process.pid, foreign.user) == (os.getpid(), getpass.getuser())
    assert foreign.process.name


def test_a_process_with_a_lease_is_not_foreign() -> None:
    assert percent(ForeignLoadTracker(), snapshot(os.getpid()), lease()) == 0.0


def test_idle_and_unused_devices_have_no_foreign_load() -> None:
    assert percent(ForeignLoadTracker(), snapshot(os.getpid(), percent=5.0)) == 0.0
    assert percent(ForeignLoadTracker(), snapshot()) == 0.0


def test_a_device_is_free_as_soon_as_the_process_has_ended() -> None:
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot(os.getpid())) == 90.0
    assert percent(loads, snapshot(), now=0.1) == 0.0


def test_a_process_in_another_container_counts_and_a_process_that_just_ended_does_not() -> None:
    assert percent(ForeignLoadTracker(), snapshot(ELSEWHERE)) == 90.0
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot()) == 0.0
    assert percent(loads, snapshot(ELSEWHERE), now=1.0) == 0.0
    assert percent(loads, snapshot(ELSEWHERE), now=2.0) == 90.0


def test_load_within_that_of_leases_is_not_foreign_even_just_after_they_ended() -> None:
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot(os.getpid()), lease(60.0, pid=ELSEWHERE)) == 30.0
    loads = ForeignLoadTracker()
    percent(loads, snapshot(os.getpid(), percent=5.0), lease(None, pid=ELSEWHERE))
    assert percent(loads, snapshot(os.getpid()), now=1.0) == 0.0
    assert percent(loads, snapshot(os.getpid()), now=100.0) > 80.0


def test_a_sample_counts_once() -> None:
    loads, sample = ForeignLoadTracker(), snapshot(os.getpid())
    first = loads.update(sample, (), 0.0, 50.0)
    assert loads.update(sample, (lease(),), 9.0, 50.0) is first
