"""Attacks with the files by which processes share simulated GPUs, in a folder of several users."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuyard.engines.suspend.drivers import Simulated
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from gpuyard.simulated_usage import SharesFolder, SimulatedShare
from gpuyard.system.file_locks import try_hold
from tests.hostile.catalogue import attack
from tests.hostile.users import ANNE, BEN, act_as, stay_as
from tests.unit.ledger import Child, child

_kept: list[int] = []


@pytest.fixture
def shares(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of simulated GPUs that root, Anne and Ben share."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.setenv("GPUYARD_HOME", str(place))
    folder = place / "simulated"
    folder.mkdir()
    folder.chmod(0o1777)
    with SharesFolder(folder).locked():
        pass
    return folder


def hold_share(folder: str, name: str, content: bytes) -> None:
    descriptor = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT, 0o644)
    os.fchmod(descriptor, 0o666)  # so that the test can change it
    os.write(descriptor, content)
    assert try_hold(descriptor)
    _kept.append(descriptor)


@contextlib.contextmanager
def ben_holds(folder: Path, content: bytes, name: str = "1-0.share") -> Iterator[Child]:
    with child(stay_as, BEN, hold_share, str(folder), name, content) as ben:
        ben.receive()
        yield ben


def free_mb(folder: str) -> list[float | None]:
    return [device.memory_free_mb for device in SimulatedDevices("2x24GB", Path(folder)).read(5.0).devices]


def share(**fields: object) -> bytes:
    return json.dumps({"pid": 1, **fields}).encode()


@attack("write random bytes as the use of a simulated GPU", now="ignored")
def test_random_bytes(shares: Path) -> None:
    with ben_holds(shares, b"\xff\x00"):
        assert act_as(ANNE, free_mb, str(shares)) == [24576.0, 24576.0]

        @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.binary(max_size=100))
        def check(content: bytes) -> None:
            (shares / "1-0.share").write_bytes(content)
            assert free_mb(str(shares)) == [24576.0, 24576.0]

        check()


@attack("use minus 10 GB of a simulated GPU", now="ignored")
def test_negative_memory(shares: Path) -> None:
    with ben_holds(shares, share(memory_mb={"SIM-0": -10240.0, "SIM-1": 1e308})):
        assert act_as(ANNE, free_mb, str(shares)) == [24576.0, 24576.0]


@attack("write the pid -5 as the user of a simulated GPU", now="ignored")
def test_negative_pid(shares: Path) -> None:
    with ben_holds(shares, share(pid=-5, memory_mb={"SIM-0": 1024.0}, load_percent={"SIM-0": 0.0})):
        assert act_as(ANNE, free_mb, str(shares)) == [24576.0, 24576.0]
        assert SimulatedDevices("2x24GB", shares).idle_seconds("SIM-0") == {}


@attack("name a file after another process than its content", now="harmless")
def test_pid_that_is_not_the_files(shares: Path) -> None:
    with ben_holds(shares, share(pid=4242, memory_mb={"SIM-0": 1024.0})):
        assert set(SimulatedDevices("2x24GB", shares).idle_seconds("SIM-0")) == {4242}


@attack(
    "leave a pipe, links and folders among the files of simulated GPUs",
    now="ignored",
)
def test_pipes_and_links(shares: Path) -> None:
    act_as(BEN, make_odd_files, str(shares))
    assert act_as(ANNE, free_mb, str(shares)) == [24576.0, 24576.0]


def make_odd_files(folder: str) -> None:
    os.mkfifo(f"{folder}/1-0.share")
    os.symlink("/dev/zero", f"{folder}/1-1.share")
    os.symlink("nowhere", f"{folder}/1-2.share")
    os.mkdir(f"{folder}/1-3.share")


@attack(
    "claim another user's process as one's own, so that its suspension fails",
    now="harmless: a user's shares are in files of that user",
)
def test_anothers_process(shares: Path) -> None:
    with ben_holds(shares, share(pid=os.getpid(), memory_mb={"SIM-0": 5.0})):
        with SimulatedUse(SimulatedDevices("2x24GB", shares)) as use:
            use.allocate("SIM-0", 1024.0)
            Simulated().lock(os.getpid())
            Simulated().suspend(os.getpid())
        theirs = json.loads((shares / "1-0.share").read_bytes())
        assert theirs["memory_mb"] == {"SIM-0": 5.0}


@attack("remove the file of another user's use", now="refused")
def test_remove_anothers_use(shares: Path) -> None:
    folder = SharesFolder(shares)
    with folder.locked():
        descriptor = folder.add(SimulatedShare(pid=os.getpid(), memory_mb={"SIM-0": 1024.0}))
    (path,) = shares.glob("*.share")
    for deed in (os.unlink, os.truncate):
        with pytest.raises(PermissionError):
            act_as(BEN, deed, str(path), *([0] if deed is os.truncate else []))
    os.close(descriptor)
