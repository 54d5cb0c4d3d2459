"""Suspending the memory that another process holds on a simulated device."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuyard.engines.suspend.drivers import CudaProcessState, DriverError, Simulated
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse

# Takes 1,000 MB at once and 500 MB more on request.
OWNER = (
    "import sys\n"
    "from gpuyard.probes.simulated_devices import SimulatedUse\n"
    "usage = SimulatedUse()\n"
    "usage.allocate('SIM-0', 1000)\n"
    "print('holding', flush=True)\n"
    "sys.stdin.readline()\n"
    "print('asks', flush=True)\n"
    "usage.allocate('SIM-0', 500)\n"
    "print('more', flush=True)\n"
    "sys.stdin.readline()\n"
)
Owner = subprocess.Popen[str]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x2GB")
    return SimulatedDevices()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert read_line(process) == "holding"
        yield process
        process.kill()


def read_line(owner: Owner) -> str:
    assert owner.stdout is not None
    return owner.stdout.readline().strip()


def request_more(owner: Owner) -> None:
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()


def test_one_process_at_a_time_reads_and_changes_shares(devices: SimulatedDevices) -> None:
    with devices.shares.locked():
        other = os.open(devices.shares.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(other)
    with devices.shares.locked():
        pass


def used_mb(devices: SimulatedDevices) -> float | None:
    return devices.read(1).devices[0].memory_used_mb


def test_the_states_change_in_the_same_order_as_with_a_driver(owner: Owner, devices: SimulatedDevices) -> None:
    driver = Simulated()
    states = [(driver.state(owner.pid), used_mb(devices))]
    for step in (driver.lock, driver.suspend, driver.restore, driver.unlock):
        step(owner.pid)
        states.append((driver.state(owner.pid), used_mb(devices)))
    assert states == [
        (CudaProcessState.RUNNING, 1000), (CudaProcessState.LOCKED, 1000), (CudaProcessState.SUSPENDED, 0),
        (CudaProcessState.LOCKED, 1000), (CudaProcessState.RUNNING, 1000),
    ]  # fmt: skip


def test_what_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Simulated().state(os.getpid()) is None, "a process without a share has no state"
    # An unknown device is named in the error.
    with pytest.raises(DriverError, match="SIM-9"):
        Simulated().free_mb("SIM-9")
    # Without simulated devices there is no simulated driver.
    monkeypatch.delenv("GPUYARD_SIMULATE")
    with pytest.raises(DriverError, match="GPUYARD_SIMULATE"):
        Simulated()


def test_a_suspended_owner_waits_at_its_next_call(owner: Owner, devices: SimulatedDevices) -> None:
    driver = Simulated()
    driver.lock(owner.pid)
    driver.suspend(owner.pid)
    request_more(owner)
    assert read_line(owner) == "asks"
    assert used_mb(devices) == 0
    driver.restore(owner.pid)
    driver.unlock(owner.pid)
    assert read_line(owner) == "more"
    assert used_mb(devices) == 1500


def test_a_share_that_no_longer_fits_can_never_be_restored(owner: Owner, devices: SimulatedDevices) -> None:
    driver = Simulated()
    driver.lock(owner.pid)
    driver.suspend(owner.pid)
    with SimulatedUse(devices) as other:
        other.allocate("SIM-0", 1500)
        assert driver.free_mb("SIM-0") == 548
        with pytest.raises(DriverError, match="not enough free memory"):
            driver.restore(owner.pid)
    with pytest.raises(DriverError, match="not enough free memory"):
        driver.restore(owner.pid)
    assert driver.state(owner.pid) is CudaProcessState.SUSPENDED
    assert used_mb(devices) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_share_cannot_be_suspended(owner: Owner, devices: SimulatedDevices) -> None:
    program = (
        "import os, sys\n"
        "from gpuyard.engines.suspend.drivers import Simulated\n"
        "driver = Simulated()\n"
        "driver.state(int(sys.argv[1]))\n"
        "os.setuid(65534)\n"
        "driver.lock(int(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(owner.pid)], capture_output=True, text=True, check=False, timeout=90
    )
    assert "Permission denied" in done.stderr
    assert Simulated().state(owner.pid) is CudaProcessState.RUNNING
