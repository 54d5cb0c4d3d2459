import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.errors import SimulatedOutOfMemory, UserError
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids
from gpuyard.simulated_usage import parse_devices

HOLD = (
    "import signal, sys\n"
    "from gpuyard.probes.simulated_devices import SimulatedUse\n"
    "usage = SimulatedUse()\n"
    "usage.allocate('SIM-0', float(sys.argv[1]))\n"
    "print('holding', flush=True)\n"
    "signal.pause()\n"
)
Holder = Callable[[float], "subprocess.Popen[str]"]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x80GB,2x24GB")
    return SimulatedDevices()


@pytest.fixture
def hold(devices: SimulatedDevices, request: pytest.FixtureRequest) -> Holder:
    """Return a function that starts a real process which holds `megabytes` of SIM-0."""

    def start(megabytes: float) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(megabytes)], stdout=subprocess.PIPE, text=True)
        request.addfinalizer(process.communicate)
        request.addfinalizer(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        return process

    return start


def test_a_machine_with_different_devices_is_described_in_one_line() -> None:
    devices = parse_devices("1x80GB, 2x24GB")
    assert [(d.id, d.index, d.memory_total_mb) for d in devices] == [
        ("SIM-0", 0, 81920),
        ("SIM-1", 1, 24576),
        ("SIM-2", 2, 24576),
    ]
    assert {d.vendor for d in devices} == {Vendor.SIMULATED}


@pytest.mark.parametrize(
    "spec", ["two", "2x", "x24GB", "0x24GB", "2x24GB,", "2y24GB", "2x-5GB", "2x24", "1x0GB", "voodoo:1x2GB"]
)
def test_an_invalid_description_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_devices(spec)
    assert refusal.value.hint


def test_simulated_devices_pass_for_those_of_several_vendors() -> None:
    spec = "nvidia:1x24GB,amd:1x16GB,2x8GB,AMD-integrated:1x2GB"
    devices = parse_devices(spec)
    assert [(each.id, each.vendor, each.index) for each in devices if each.vendor != "simulated"] == [
        ("SIM-nvidia-0", "nvidia", 0), ("SIM-amd-0", "amd", 0), ("SIM-amd-1", "amd", 1),
    ]  # fmt: skip
    assert [each.id for each in devices if each.is_integrated] == ["SIM-amd-1"]
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "SIM-amd-0", "HIP_VISIBLE_DEVICES": "0"}
    assert visible_device_ids(SimulatedDevices(spec), environment) == ("SIM-amd-0",)


def test_a_new_machine_has_no_processes_and_then_those_of_others_with_their_memory(
    devices: SimulatedDevices, hold: Holder
) -> None:
    first = devices.read(1).devices[0]
    assert (first.memory_used_mb, first.memory_free_mb, first.utilization_percent) == (0, 81920, 0)
    assert first.processes == ()
    process = hold(5000)
    first, second, _ = devices.read(1).devices
    assert (first.memory_used_mb, second.memory_used_mb) == (5000, 0)
    assert first.processes is not None
    assert [(p.pid, p.memory_mb) for p in first.processes] == [(process.pid, 5000)]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_memory_is_free_after_any_kind_of_end(devices: SimulatedDevices, hold: Holder, ending: signal.Signals) -> None:
    process = hold(5000)
    process.send_signal(ending)
    process.wait(90)
    assert devices.read(1).devices[0].memory_used_mb == 0
    assert not list(devices.folder.glob("*.share"))


def test_a_full_or_unknown_device_is_refused_like_cudas(devices: SimulatedDevices, hold: Holder) -> None:
    hold(80000)
    with SimulatedUse(devices) as usage:
        usage.allocate("SIM-0", 1000)
        with pytest.raises(SimulatedOutOfMemory, match=r"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"):
            usage.allocate("SIM-0", 2048)
        assert devices.read(1).devices[0].memory_used_mb == 81000
    with SimulatedUse(devices) as usage, pytest.raises(UserError) as refusal:
        usage.allocate("SIM-9", 1)
    assert "SIM-0" in str(refusal.value.hint)


def test_load_adds_up_to_at_most_a_hundred(devices: SimulatedDevices) -> None:
    with SimulatedUse(devices) as one, SimulatedUse(devices) as two:
        one.set_load("SIM-1", 70)
        assert devices.read(1).devices[1].utilization_percent == 70
        two.set_load("SIM-1", 70)
        busy = devices.read(1).devices[1]
        assert busy.utilization_percent == 100
        assert busy.power_draw_w == busy.power_limit_w
    assert devices.read(1).devices[1].utilization_percent == 0


def test_concurrent_processes_never_get_more_than_the_total(devices: SimulatedDevices, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from gpuyard.errors import SimulatedOutOfMemory\n"
        "from gpuyard.probes.simulated_devices import SimulatedUse\n"
        "usage, got = SimulatedUse(), 0\n"
        "for _ in range(100):\n"
        "    try: usage.allocate('SIM-1', 512); got += 512\n"
        "    except SimulatedOutOfMemory: pass\n"
        "print(got, flush=True)\n"
        "sys.stdin.read()\n"
    )
    start = [sys.executable, "-c", program]
    crowd = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    taken = [int(process.stdout.readline()) for process in crowd if process.stdout]
    assert sum(taken) == 24576
    assert devices.read(1).devices[1].memory_free_mb == 0
    for process in crowd:
        process.communicate()
    assert devices.read(1).devices[1].memory_free_mb == 24576


@pytest.mark.parametrize(
    ("visible", "ids"),
    [(None, ("SIM-0", "SIM-1", "SIM-2")), ("1", ("SIM-1",)), ("SIM-2,0", ("SIM-2", "SIM-0")), ("", ()), ("7", ())],
)
def test_only_visible_devices_are_seen(devices: SimulatedDevices, visible: str | None, ids: tuple[str, ...]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_device_ids(devices, environment) == ids


def test_without_a_description_there_are_no_devices() -> None:
    assert "GPUYARD_SIMULATE" not in os.environ
    with pytest.raises(UserError, match="no simulated devices"):
        SimulatedDevices()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two users")
def test_users_with_a_strict_umask_still_see_each_other(devices: SimulatedDevices) -> None:
    shared = Path(tempfile.gettempdir()) / f"gpuyard-shared-{os.getpid()}"
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse\n"
        "os.umask(0o077); os.setuid(int(sys.argv[1]))\n"
        "devices = SimulatedDevices('1x24GB', Path(sys.argv[2]))\n"
        "usage = SimulatedUse(devices)\n"
        "usage.allocate('SIM-0', 1000)\n"
        "print(devices.read(1).devices[0].memory_used_mb, flush=True)\n"
        "sys.stdin.read()\n"
    )
    shared.mkdir()
    shared.chmod(0o1777)
    try:
        users = []
        for uid in ("65533", "65534"):
            users.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, uid, str(shared)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd="/",
                )
            )
            assert users[-1].stdout is not None
            assert float(users[-1].stdout.readline()) == 1000 * len(users)
        for user in users:
            user.communicate()
        assert SimulatedDevices("1x24GB", shared).read(1).devices[0].memory_used_mb == 0
    finally:
        shutil.rmtree(shared)
