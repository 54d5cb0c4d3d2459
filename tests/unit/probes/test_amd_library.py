"""The `amdsmi` library, with a stand-in module in its place."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process, Vendor
from gpuyard.probes.amd.amdsmi_library import AmdSmiLibrary

NOWHERE = Path("/nonexistent")  # no kernel files
UUID = "a1ff740f-0000-1000-80b2-c3d4e5f60718"


class AmdSmiException(Exception):
    """Raised by the library for every error."""


def answer(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def refuse(*_: Any) -> Any:
    raise AmdSmiException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library of ROCm 7, with one card."""
    module: Any = ModuleType("amdsmi")
    module.AmdSmiException = AmdSmiException
    module.AmdSmiMemoryType = SimpleNamespace(VRAM=0)
    module.AmdSmiTemperatureType = SimpleNamespace(EDGE="edge", HOTSPOT="hotspot")
    module.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    module.amdsmi_init = answer(None)
    module.amdsmi_shut_down = answer(None)
    module.amdsmi_get_processor_handles = answer(["handle"])
    module.amdsmi_get_gpu_device_uuid = answer(UUID)
    module.amdsmi_get_gpu_device_bdf = answer("0000:05:00.0")
    module.amdsmi_get_gpu_asic_info = answer({"market_name": "Example", "asic_serial": "0xA1B2C3D4E5F60718"})
    module.amdsmi_get_gpu_memory_total = answer(17179869184)
    module.amdsmi_get_gpu_memory_usage = answer(1073741824)
    module.amdsmi_get_gpu_vram_usage = answer({"vram_total": 16384, "vram_used": 1000})
    module.amdsmi_get_gpu_activity = answer({"gfx_activity": 64, "umc_activity": 1, "mm_activity": "N/A"})
    module.amdsmi_get_power_info = answer({"socket_power": 150, "average_socket_power": "N/A", "power_limit": 300})
    module.amdsmi_get_power_cap_info = answer({"power_cap": 250000000})
    module.amdsmi_get_temp_metric = lambda _handle, sensor, _metric: {"edge": 40, "hotspot": 50}[sensor]
    usage = {"gtt_mem": 9, "cpu_mem": 0, "vram_mem": 1048576}
    module.amdsmi_get_gpu_process_list = answer([{"name": "python3", "pid": 12, "mem": 0, "memory_usage": usage}])
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def read_one() -> Device:
    (device,) = AmdSmiLibrary(NOWHERE).read(5).devices
    return device


@pytest.mark.usefixtures("amdsmi")
def test_all_figures_of_a_card_are_read() -> None:
    assert read_one() == Device(
        id="GPU-a1b2c3d4e5f60718", vendor=Vendor.AMD, index=0, name="Example", pci_bus_id="0000:05:00.0",
        memory_total_mb=16384.0, memory_used_mb=1024.0, memory_free_mb=15360.0, utilization_percent=64.0,
        power_draw_w=150.0, power_limit_w=250.0, temperature_c=40.0,
        processes=(Process(pid=12, memory_mb=1.0, name="python3"),),
    )  # fmt: skip


def test_figures_that_a_card_or_a_release_does_not_have_are_unknown(amdsmi: Any) -> None:
    for name in dir(amdsmi):
        if name.startswith("amdsmi_get_") and name != "amdsmi_get_processor_handles":
            setattr(amdsmi, name, refuse)
    assert read_one() == Device(id="amd-0", vendor=Vendor.AMD, index=0)
    for name in dir(amdsmi):
        if name.startswith(("amdsmi_get_gpu_", "amdsmi_get_power", "amdsmi_get_temp", "AmdSmi")):
            delattr(amdsmi, name)
    assert read_one() == Device(id="amd-0", vendor=Vendor.AMD, index=0)


@pytest.mark.parametrize("answered", [None, "N/A", {}, [], {"gfx_activity": 65535, "power_cap": {}}, object()])
def test_answers_of_an_unexpected_type_are_unknown(amdsmi: Any, answered: object) -> None:
    for name in dir(amdsmi):
        if name.startswith("amdsmi_get_") and name != "amdsmi_get_processor_handles":
            setattr(amdsmi, name, answer(answered))
    processes = () if answered == [] else None
    assert read_one() == Device(id="amd-0", vendor=Vendor.AMD, index=0, processes=processes)


@pytest.mark.parametrize(
    ("power", "cap", "draw_w", "limit_w"),
    [
        ({"average_socket_power": 90, "power_limit": 300000000}, refuse, 90.0, 300.0),
        ({"current_socket_power": 80, "average_socket_power": "N/A"}, answer({"power_cap": 225}), 80.0, 225.0),
        ({"current_socket_power": 65535, "average_socket_power": 70}, answer({"power_cap": 0}), 70.0, None),
        ({"socket_power": "N/A", "power_limit": 4294967295}, refuse, None, None),
    ],
    ids=["5.7 and before RDNA", "MI300", "no cap", "a guest"],
)
def test_power_is_found_under_the_keys_of_every_release(
    amdsmi: Any, power: dict[str, object], cap: Callable[..., Any], draw_w: float | None, limit_w: float | None
) -> None:
    amdsmi.amdsmi_get_power_info = answer(power)
    amdsmi.amdsmi_get_power_cap_info = cap
    device = read_one()
    assert (device.power_draw_w, device.power_limit_w) == (draw_w, limit_w)


def test_another_figure_is_the_fallback_for_one_that_is_missing(amdsmi: Any) -> None:
    amdsmi.amdsmi_get_gpu_memory_total = refuse
    amdsmi.amdsmi_get_gpu_memory_usage = refuse
    device = read_one()
    assert (device.memory_total_mb, device.memory_used_mb) == (16384.0, 1000.0)
    amdsmi.amdsmi_get_temp_metric = lambda _handle, sensor, _metric: 50 if sensor == "hotspot" else refuse()
    assert read_one().temperature_c == 50.0


def test_processes_given_as_handles_are_queried(amdsmi: Any) -> None:
    amdsmi.amdsmi_get_gpu_process_list = answer(["first", "second"])
    amdsmi.amdsmi_get_gpu_process_info = lambda _card, process: (
        {"pid": 3, "name": "old", "mem": 2097152} if process == "first" else refuse()
    )
    assert read_one().processes == (Process(pid=3, memory_mb=2.0, name="old"),)


def test_partitions_of_one_card_have_unique_ids_and_equal_figures_of_a_process_are_unknown(amdsmi: Any) -> None:
    amdsmi.amdsmi_get_processor_handles = answer(["first", "second"])
    devices = AmdSmiLibrary(NOWHERE).read(5).devices
    assert [device.processes for device in devices] == [(Process(pid=12, name="python3"),)] * 2
    assert [device.id for device in devices] == ["GPU-a1b2c3d4e5f60718#0", "GPU-a1b2c3d4e5f60718#1"]


def test_the_library_is_initialised_once_and_again_after_a_failure(amdsmi: Any) -> None:
    starts: list[None] = []
    amdsmi.amdsmi_init = lambda: starts.append(None)
    probe = AmdSmiLibrary()
    probe.read(5)
    probe.read(5)
    assert len(starts) == 1
    handles, amdsmi.amdsmi_get_processor_handles = amdsmi.amdsmi_get_processor_handles, refuse
    with pytest.raises(ProbeCrashed):
        probe.read(5)
    amdsmi.amdsmi_get_processor_handles = handles
    assert len(probe.read(5).devices) == 1
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("34 | AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded", ProbeMissing),
        ("10 | AMDSMI_STATUS_NO_PERM - Permission Denied", ProbeDenied),
        ("32 | AMDSMI_STATUS_NOT_INIT", ProbeCrashed),
    ],
)
def test_a_failed_initialisation_is_reported_in_one_line(amdsmi: Any, message: str, error: type[ProbeError]) -> None:
    def fail() -> None:
        raise AmdSmiException(f"Error code:\n\t{message}")

    amdsmi.amdsmi_init = fail
    with pytest.raises(error) as caught:
        AmdSmiLibrary().read(5)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import a_missing_module", ProbeMissing), ("raise KeyError('libamd_smi.so')", ProbeMissing),
        ("raise OSError('libamd_smi.so: cannot open shared object file')", ProbeMissing),
        ("raise AttributeError('undefined symbol: amdsmi_init')", ProbeCrashed),
        ("raise RuntimeError('odd')", ProbeCrashed), ("raise SystemExit(1)", ProbeCrashed),
        ("this is no Python", ProbeCrashed), ("", ProbeCrashed),
    ],
)  # fmt: skip
def test_a_library_that_cannot_be_imported_is_missing_or_broken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    error: type[ProbeError],
) -> None:
    (tmp_path / "amdsmi.py").write_text(f"print('Unable to find libamd_smi.so library')\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(error):
        AmdSmiLibrary().read(5)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    assert capsys.readouterr().out == ""


def test_a_missing_library_is_reported_and_a_present_one_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(ProbeMissing):
        AmdSmiLibrary().read(5)
    assert AmdSmiLibrary().may_hang
