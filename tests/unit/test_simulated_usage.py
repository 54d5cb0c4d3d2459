"""A share of a simulated device that another process suspends."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuyard.engines.suspend.move_memory import CudaProcessState, DriverError
from gpuyard.engines.suspend.simulated_driver import Simulated
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse

# Takes 1,000 MB at once and 500 MB more when it is told to.
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
        assert said(process) == "holding"
        yield process
        process.kill()


def said(owner: Owner) -> str:
    assert owner.stdout is not None
    return owner.stdout.readline().strip()


def tell(owner: Owner) -> None:
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()


def test_one_process_at_a_time_reads_and_changes_shares(devices: SimulatedDevices) -> None:
    with devices.shares.locked(), devices.shares.lock_path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with devices.shares.locked():
        pass


def used_mb(devices: SimulatedDevices) -> float | None:
    return devices.read(1).devices[0].memory_used_mb


def test_its_states_follow_each_other_as_a_drivers_do(owner: Owner, devices: SimulatedDevices) -> None:
    driver = Simulated()
    seen = [(driver.state(owner.pid), used_mb(devices))]
    for step in (driver.lock, driver.suspend, driver.restore, driver.unlock):
        step(owner.pid)
        seen.append((driver.state(owner.pid), used_mb(devices)))
    assert seen == [
        (CudaProcessState.RUNNING, 1000),
        (CudaProcessState.LOCKED, 1000),
        (CudaProcessState.SUSPENDED, 0),
        (CudaProcessState.LOCKED, 1000),
        (CudaProcessState.RUNNING, 1000),
    ]


def test_who_takes_nothing_has_nothing_to_suspend() -> None:
    assert Simulated().state(os.getpid()) is None


def test_a_suspended_owner_waits_at_its_next_call(owner: Owner, devices: SimulatedDevices) -> None:
    driver = Simulated()
    driver.lock(owner.pid)
    driver.suspend(owner.pid)
    tell(owner)
    assert said(owner) == "asks"
    assert used_mb(devices) == 0
    driver.restore(owner.pid)
    driver.unlock(owner.pid)
    assert said(owner) == "more"
    assert used_mb(devices) == 1500


def test_what_does_not_fit_any_more_is_ruined_for_ever(owner: Owner, devices: SimulatedDevices) -> None:
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


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DriverError, match="SIM-9"):
        Simulated().free_mb("SIM-9")


def test_without_simulated_devices_there_is_no_such_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUYARD_SIMULATE")
    with pytest.raises(DriverError, match="GPUYARD_SIMULATE"):
        Simulated()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_share_is_not_to_be_touched(owner: Owner, devices: SimulatedDevices) -> None:
    program = (
        "import os, sys\n"
        "from gpuyard.engines.suspend.simulated_driver import Simulated\n"
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
