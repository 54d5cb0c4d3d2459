"""The load of foreign processes over several samples. This process plays the foreign process."""

import getpass
import os

import pytest

from gpuyard.ledger.measured_usage import ForeignLoadTracker
from gpuyard.model.lease import Lease, Share
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.system.processes import this_process

ELSEWHERE = 2**22 + 7  # higher than any pid of this machine


def snapshot(*pids: int, percent: float = 90.0) -> Snapshot:
    processes = tuple(Process(pid=pid) for pid in pids)
    return seen(percent, used_mb=2048.0 if pids else 3.0, processes=processes)


def seen(percent: float, used_mb: float | None, processes: tuple[Process, ...] | None) -> Snapshot:
    device = Device(
        id="G0", vendor=Vendor.NVIDIA, memory_used_mb=used_mb, utilization_percent=percent, processes=processes
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


def test_only_a_busy_process_without_a_lease_is_foreign_until_it_ends() -> None:
    load = ForeignLoadTracker().update(snapshot(os.getpid()), (), 0.0, 50.0)["G0"]
    assert (load.percent, load.is_over) == (90.0, True)
    (foreign,) = load.processes
    assert (foreign.process.pid, foreign.user) == (os.getpid(), getpass.getuser())
    assert foreign.process.name
    assert percent(ForeignLoadTracker(), snapshot(os.getpid()), lease()) == 0.0
    assert percent(ForeignLoadTracker(), snapshot(os.getpid(), percent=5.0)) == 0.0
    assert percent(ForeignLoadTracker(), snapshot()) == 0.0
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot(os.getpid())) == 90.0
    assert percent(loads, snapshot(), now=0.1) == 0.0


def test_a_process_in_another_container_counts_a_sample_once_and_what_just_ended_not() -> None:
    assert percent(ForeignLoadTracker(), snapshot(ELSEWHERE)) == 90.0
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot()) == 0.0
    assert percent(loads, snapshot(ELSEWHERE), now=1.0) == 0.0
    assert percent(loads, snapshot(ELSEWHERE), now=2.0) == 90.0
    loads, sample = ForeignLoadTracker(), snapshot(os.getpid())
    first = loads.update(sample, (), 0.0, 50.0)
    assert loads.update(sample, (lease(),), 9.0, 50.0) is first


def test_load_within_that_of_leases_is_not_foreign_even_just_after_they_ended() -> None:
    loads = ForeignLoadTracker()
    assert percent(loads, snapshot(os.getpid()), lease(60.0, pid=ELSEWHERE)) == 30.0
    loads = ForeignLoadTracker()
    percent(loads, snapshot(os.getpid(), percent=5.0), lease(None, pid=ELSEWHERE))
    assert percent(loads, snapshot(os.getpid()), now=1.0) == 0.0
    assert percent(loads, snapshot(os.getpid()), now=100.0) > 80.0


UNLISTED = pytest.mark.parametrize("processes", [None, ()])


@UNLISTED
@pytest.mark.parametrize("used_mb", [9000.0, 500.0, None])
def test_load_without_processes_is_foreign(processes: tuple[Process, ...] | None, used_mb: float | None) -> None:
    load = ForeignLoadTracker().update(seen(97.0, used_mb, processes), (), 0.0, 50.0)["G0"]
    assert (load.percent, load.is_over, load.processes) == (97.0, True, ())


@UNLISTED
def test_memory_that_an_idle_driver_holds_closes_nothing(processes: tuple[Process, ...] | None) -> None:
    load = ForeignLoadTracker().update(seen(3.0, 600.0, processes), (), 0.0, 50.0)["G0"]
    assert (load.percent, load.is_over) == (3.0, False)
    assert percent(ForeignLoadTracker(), seen(97.0, 3.0, processes)) == 0.0, "a program has just ended"


@UNLISTED
def test_load_of_leases_is_not_foreign_where_no_process_is_listed(processes: tuple[Process, ...] | None) -> None:
    loads = ForeignLoadTracker()
    for now in range(20):
        assert percent(loads, seen(97.0, 9000.0, processes), lease(None), now=now) == 0.0
    # The job has ended, and its load shows for another second.
    assert percent(loads, seen(97.0, 9000.0, processes), now=20.0) == 0.0
    assert percent(loads, seen(97.0, 600.0, processes), now=20.5) < 10.0


@UNLISTED
@pytest.mark.parametrize("used_mb", [9000.0, 400.0])
@pytest.mark.parametrize("interval_s", [0.05, 0.25, 0.5, 1.0])
def test_a_steep_drop_opens_a_device_without_a_list_within_a_second(
    processes: tuple[Process, ...] | None, used_mb: float, interval_s: float
) -> None:
    loads, now = ForeignLoadTracker(), 0.0
    while now < 30.0:
        assert loads.update(seen(97.0, 9000.0, processes), (), now, 50.0)["G0"].is_over
        now += interval_s
    dropped_at = now - interval_s
    while loads.update(seen(4.0, used_mb, processes), (), now, 50.0)["G0"].is_over:
        now += interval_s
    assert now - dropped_at <= 1.0


def test_a_short_lull_opens_nothing() -> None:
    loads = ForeignLoadTracker()
    for tick in range(100):
        reading = 0.0 if tick % 10 == 9 else 97.0
        assert loads.update(seen(reading, 9000.0, ()), (), 0.25 * tick, 50.0)["G0"].is_over
