"""The RAM of a lease: that of its holder's processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from gpuyard.ledger.measured_usage import HostMeter
from gpuyard.model.lease import HostShare, Lease
from gpuyard.policy.host_room import HostUse
from gpuyard.system.processes import start_time, this_process

HOLD = (
    "import subprocess, sys; kept = bytearray(int(sys.argv[1]) << 20)\n"
    "child = len(sys.argv) > 2 and subprocess.Popen([sys.executable, '-c', sys.argv[2], '30'])\n"
    "child or print('ready', flush=True)\n"
    "sys.stdin.read()"
)


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[str]"]:
    """A process with 40 MB whose child has 30 MB."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD, "40", HOLD], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.communicate()


def lease(name: str, pid: int, ram_mb: float, **changes: object) -> Lease:
    me = replace(this_process(), pid=pid, pid_started=start_time(pid))
    return Lease(id=name, holder=me, shares=(), since=0.0, host=HostShare(ram_mb=ram_mb, **changes))  # type: ignore[arg-type]


def used_mb(*leases: Lease) -> dict[str, float | None]:
    return {name: use.ram_mb for name, use in HostMeter().use_of(leases).items()}


def test_the_holder_and_its_children_count(holder: "subprocess.Popen[str]") -> None:
    (used,) = used_mb(lease("a", holder.pid, 1024.0)).values()
    assert used is not None
    assert 70 < used < 120


def test_two_leases_of_one_process_divide_what_it_uses_and_what_holders_hold_is_known(
    holder: "subprocess.Popen[str]",
) -> None:
    used = used_mb(lease("a", holder.pid, 50.0), lease("b", holder.pid, 1024.0))
    assert used["a"] == 50.0
    assert 20 < (used["b"] or 0.0) < 70
    plain = replace(lease("plain", holder.pid, 1.0), host=None)
    told = lease("told", os.getpid(), 1024.0, used_mb=700.0)
    gone = replace(plain, id="gone", holder=replace(plain.holder, pid_started=1.0))
    found = HostMeter().held_by([plain, told, gone])
    assert set(found) == {"plain", "told"}
    assert 70 < found["plain"] < 120
    assert found["told"] == 700.0


def test_a_holder_that_has_ended_or_says_what_it_uses_is_not_measured() -> None:
    process = subprocess.Popen(["true"])
    gone = lease("a", process.pid, 1024.0)
    process.wait()
    assert HostMeter().use_of([gone]) == {"a": HostUse()}
    told = lease("a", os.getpid(), 1024.0, used_mb=5.0)
    without = replace(told, id="b", host=HostShare(cpus=2.0))
    assert HostMeter().use_of([told, without, replace(told, id="c", host=None)]) == {}
