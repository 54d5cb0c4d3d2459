import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from gpuyard.ledger.measured_usage import LEASE_VARIABLE, LeaseFinder, measure, measure_loads
from gpuyard.model.lease import Lease, Share
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.system.processes import this_process
from tests.unit.ledger import as_root

OTHER_UID = 65534
OTHER = 1  # some process that is neither ours nor a child of ours


def lease(name: str, *device_ids: str, memory_mb: float | None = 4096.0, **holder: int) -> Lease:
    shares = tuple(Share(device_id=each, memory_mb=memory_mb, is_exclusive=False) for each in device_ids)
    return Lease(id=name, holder=msgspec.structs.replace(this_process(), **holder), shares=shares, since=0.0)


def device(name: str, processes: dict[int, float | None] | None) -> Device:
    listed = None if processes is None else tuple(Process(pid=pid, memory_mb=mb) for pid, mb in processes.items())
    return Device(id=name, vendor=Vendor.NVIDIA, memory_total_mb=24576.0, processes=listed)


def machine(*devices: Device) -> Snapshot:
    return Snapshot(taken_at=0.0, host=Host(), devices=devices)


@contextmanager
def sleeper(lease_id: str = "", user: int | None = None) -> Iterator[int]:
    """Yield the pid of a program that has started: before that it has no environment for a moment."""
    program = subprocess.Popen(
        ["sh", "-c", "echo up; read word"], env={**os.environ, LEASE_VARIABLE: lease_id}, user=user,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        yield program.pid
    finally:
        program.kill()
        program.communicate()


@contextmanager
def foreign_process() -> Iterator[int]:
    """A process with a parent that is not ours."""
    shell = subprocess.Popen(["sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
    output, _ = shell.communicate(timeout=90)
    try:
        yield int(output)
    finally:
        os.kill(int(output), 9)


def test_the_holder_and_its_children_count_for_the_lease() -> None:
    with sleeper() as child:
        snapshot = machine(device("G0", {os.getpid(): 100.0, child: 20.0, OTHER: 3.0}))
        assert measure(snapshot, [lease("a", "G0")]) == {("a", "G0"): 120.0}


def test_what_a_lease_holds_is_zero_or_unknown_and_measured_on_each_device() -> None:
    assert measure(machine(device("G0", {}), device("G1", {})), [lease("a", "G0")]) == {("a", "G0"): 0.0}
    snapshot = machine(device("G0", None), device("G1", {os.getpid(): None}))
    assert measure(snapshot, [lease("a", "G0", "G1")]) == {("a", "G0"): None, ("a", "G1"): None}
    snapshot = machine(device("G0", {os.getpid(): 100.0}), device("G1", {os.getpid(): 20.0}))
    assert measure(snapshot, [lease("a", "G0"), lease("b", "G1")]) == {("a", "G0"): 100.0, ("b", "G1"): 20.0}
    stale = lease("a", "G0")
    stale = msgspec.structs.replace(stale, holder=msgspec.structs.replace(stale.holder, pid_started=1.0))
    assert measure(machine(device("G0", {os.getpid(): 100.0})), [stale]) == {("a", "G0"): 0.0}


def test_without_a_process_list_the_growth_of_use_counts_for_the_only_lease() -> None:
    measured = msgspec.structs.replace(device("G0", None), memory_used_mb=5000.0)
    [share] = lease("a", "G0").shares
    granted = msgspec.structs.replace(lease("a"), shares=(msgspec.structs.replace(share, foreign_mb=1800.0),))
    assert measure(machine(measured), [granted]) == {("a", "G0"): 3200.0}
    after_foreign_exit = msgspec.structs.replace(measured, memory_used_mb=900.0)
    assert measure(machine(after_foreign_exit), [granted]) == {("a", "G0"): 0.0}
    other = msgspec.structs.replace(granted, id="b")
    assert measure(machine(measured), [granted, other]) == {("a", "G0"): None, ("b", "G0"): None}, (
        "unknown which lease holds it"
    )


def test_a_process_belongs_to_the_lease_it_was_started_with_and_a_foreign_one_to_none() -> None:
    with sleeper("b") as started:
        snapshot = machine(device("G0", {started: 500.0}))
        leases = [lease("a", "G0"), lease("b", "G0", pid=OTHER)]
        assert measure(snapshot, leases) == {("a", "G0"): 0.0, ("b", "G0"): 500.0}
        assert [found.id for found in LeaseFinder(leases).find(started)] == ["b"]
    with foreign_process() as pid:
        assert measure(machine(device("G0", {pid: 500.0})), [lease("a", "G0")]) == {("a", "G0"): 0.0}
        assert LeaseFinder([lease("a", "G0")]).find(pid) == []
    assert LeaseFinder([lease("a", "G0")]).find(2**22 + 1) == [], "a process that has ended"


def test_the_load_of_a_lease_is_that_of_its_processes_where_the_driver_says_so() -> None:
    with sleeper("mine") as own, foreign_process() as foreign:
        busy = [Process(pid=own, utilization_percent=30.0), Process(pid=foreign, utilization_percent=60.0)]
        card = msgspec.structs.replace(device("G0", {}), processes=tuple(busy))
        leases = [lease("mine", "G0", pid=OTHER), lease("idle", "G0", pid=OTHER)]
        assert measure_loads(machine(card), leases) == {("mine", "G0"): 30.0, ("idle", "G0"): 0.0}
        assert measure_loads(machine(device("G0", {own: 100.0})), leases) == {}


@pytest.mark.parametrize(
    ("used", "first", "second"), [(1000.0, 1000.0, 0.0), (5000.0, 4096.0, 904.0), (9000.0, 4096.0, 4904.0)]
)
def test_memory_of_a_process_with_two_leases_fills_one_by_one(used: float, first: float, second: float) -> None:
    snapshot = machine(device("G0", {os.getpid(): used}))
    assert measure(snapshot, [lease("a", "G0"), lease("b", "G0")]) == {("a", "G0"): first, ("b", "G0"): second}


@as_root
def test_processes_of_other_users_do_not_count_for_a_lease() -> None:
    with sleeper("a", user=OTHER_UID) as forger:
        snapshot = machine(device("G0", {forger: 500.0}))
        assert measure(snapshot, [lease("a", "G0", pid=OTHER)]) == {("a", "G0"): 0.0}
    with sleeper(user=OTHER_UID) as victim:
        snapshot = machine(device("G0", {victim: 500.0}))
        assert measure(snapshot, [lease("a", "G0", pid=victim, uid=1000)]) == {("a", "G0"): 0.0}
