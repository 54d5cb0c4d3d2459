"""Who keeps a device busy without a lease, from look to look. This process stands for a stranger."""

import getpass
import os

from gpuyard.core.lease import Lease, Share
from gpuyard.core.snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.leases.foreign_load_tracker import ForeignLoadTracker
from gpuyard.system.process_identity import this_process

ELSEWHERE = 2**22 + 7  # no process of this machine has so high a number


def seen(*pids: int, percent: float = 90.0) -> Snapshot:
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


def percent(loads: ForeignLoadTracker, look: Snapshot, *leases: Lease, now: float = 0.0) -> float:
    return loads.update(look, leases, now, 50.0)["G0"].percent


def test_a_process_without_a_lease_is_named_with_its_user() -> None:
    load = ForeignLoadTracker().update(seen(os.getpid()), (), 0.0, 50.0)["G0"]
    assert (load.percent, load.is_over) == (90.0, True)
    (stranger,) = load.processes
    assert (stranger.process.pid, stranger.user) == (os.getpid(), getpass.getuser())
    assert stranger.process.name


def test_a_process_with_a_lease_is_not_foreign() -> None:
    assert percent(ForeignLoadTracker(), seen(os.getpid()), lease()) == 0.0


def test_idle_and_unused_devices_have_no_foreign_load() -> None:
    assert percent(ForeignLoadTracker(), seen(os.getpid(), percent=5.0)) == 0.0
    assert percent(ForeignLoadTracker(), seen()) == 0.0


def test_a_device_is_free_as_soon_as_the_process_has_gone() -> None:
    loads = ForeignLoadTracker()
    assert percent(loads, seen(os.getpid())) == 90.0
    assert percent(loads, seen(), now=0.1) == 0.0


def test_a_process_in_another_container_counts_and_a_process_that_just_ended_does_not() -> None:
    assert percent(ForeignLoadTracker(), seen(ELSEWHERE)) == 90.0
    loads = ForeignLoadTracker()
    assert percent(loads, seen()) == 0.0
    assert percent(loads, seen(ELSEWHERE), now=1.0) == 0.0
    assert percent(loads, seen(ELSEWHERE), now=2.0) == 90.0


def test_what_leases_explain_is_not_foreign_also_when_they_have_just_ended() -> None:
    loads = ForeignLoadTracker()
    assert percent(loads, seen(os.getpid()), lease(60.0, pid=ELSEWHERE)) == 30.0
    loads = ForeignLoadTracker()
    percent(loads, seen(os.getpid(), percent=5.0), lease(None, pid=ELSEWHERE))
    assert percent(loads, seen(os.getpid()), now=1.0) == 0.0
    assert percent(loads, seen(os.getpid()), now=100.0) > 80.0


def test_a_look_counts_once() -> None:
    loads, look = ForeignLoadTracker(), seen(os.getpid())
    first = loads.update(look, (), 0.0, 50.0)
    assert loads.update(look, (lease(),), 9.0, 50.0) is first
