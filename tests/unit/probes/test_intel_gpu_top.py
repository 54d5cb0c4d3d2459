"""`intel_gpu_top -J`: an endless stream that begins with garbage and may be cut anywhere."""

from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.probes.intel.intel_gpu_top import IntelGpuTop, parse
from tests.executables import write_executable
from tests.in_time import in_time
from tests.unit.probes.samples_intel import TOP_ARC, TOP_NEW, TOP_OLD

GARBAGE = TOP_OLD[: TOP_OLD.index("},\n{\n") + 1]


def read(text: str) -> Device:
    (device,) = parse(text).devices
    return device


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "intel_gpu_top"
    write_executable(tool, f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def add_card(root: Path, number: int, bus: str, model: str, driver: str = "i915") -> None:
    folder = root / f"sys/devices/pci0000:00/{bus}"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x8086\n")
    (folder / "device").write_text(f"{model}\n")
    (folder / "uevent").write_text(f"DRIVER={driver}\nPCI_SLOT_NAME={bus}\n")
    node = root / f"sys/class/drm/card{number}"
    node.mkdir(parents=True)
    (node / "device").symlink_to(folder)


def test_the_last_sample_of_some_length_counts() -> None:
    device = read(TOP_OLD)
    assert (device.utilization_percent, device.power_draw_w) == (37.25, 4.25)
    device = read(GARBAGE)
    assert (device.utilization_percent, device.power_draw_w) == (None, None)
    device = read('[{"period": {"duration": 0.004}, "clients": {"1": {"pid": "77", "name": "x"}}}')
    assert device.processes == (Process(pid=77, name="x"),)


def test_power_is_that_of_the_gpu_where_it_is_reported() -> None:
    assert read(TOP_NEW).power_draw_w == 3.125
    assert (
        read('{"engines": {}, "period": {"duration": 9}, "power": {"Package": 20, "unit": "W"}}').power_draw_w is None
    )
    device = read(TOP_ARC)
    assert (device.utilization_percent, device.power_draw_w) == (91.33, None)


def test_process_memory_is_the_device_memory_of_all_its_clients() -> None:
    assert read(TOP_NEW).processes == (
        Process(pid=2001, memory_mb=None, name="Xwayland"),
        Process(pid=4100, memory_mb=600.0, name="blender"),
    )
    text = TOP_NEW.replace('"local0": { "total": "104857600", "shared": "0", "resident": "104857600" }', "")
    assert (read(text).processes or ())[1] == Process(pid=4100, memory_mb=None, name="blender")
    assert read(TOP_ARC).processes == ()
    assert read(TOP_OLD).processes is None


def test_used_memory_is_unknown_but_at_least_what_the_clients_hold() -> None:
    device = read(TOP_NEW)
    assert (device.memory_used_mb, device.memory_free_mb, device.memory_used_at_least_mb) == (None, None, 600.0)
    text = TOP_NEW.replace('"total": "838860800", "shared": "0"', '"total": "838860800", "shared": "52428800"')
    text = text.replace(
        '"local0": { "total": "104857600", "shared": "0"', '"local0": { "total": "104857600", "shared": "52428800"'
    )
    assert read(text).memory_used_at_least_mb == 550.0
    assert read(TOP_ARC).memory_used_at_least_mb == 0.0
    assert read(TOP_OLD).memory_used_at_least_mb is None
    assert read(TOP_NEW.replace("local0", "system")).memory_used_at_least_mb is None
    assert read(TOP_NEW.replace('"resident"', '"active"')).memory_used_at_least_mb is None


@pytest.mark.parametrize(
    "stream",
    [
        TOP_OLD.lstrip().removeprefix("["), TOP_OLD.replace("},\n{\n", "}\n{\n"),
        TOP_OLD.replace("},\n{\n", "}{\n") + "]", TOP_OLD + ",", "card1:\n" + TOP_OLD,
    ],
)  # fmt: skip
def test_brackets_and_commas_may_be_missing_or_repeated(stream: str) -> None:
    assert read(stream) == read(TOP_OLD)


def test_the_complete_members_of_a_truncated_sample_count_unless_there_is_a_complete_one() -> None:
    cut = TOP_OLD[: TOP_OLD.index('"sema"', TOP_OLD.index("37.25"))]
    assert read(cut).utilization_percent == 37.25
    assert read(cut[: cut.index("37.25") + 3]).utilization_percent == 12.5
    later = TOP_ARC[: TOP_ARC.index('"Compute"')]
    assert read(f"{TOP_OLD},\n{later}").utilization_percent == 37.25


def test_numbers_that_are_invalid_in_json_are_unknown_and_affect_nothing_else() -> None:
    device = read(TOP_OLD.replace("37.250000", "-nan").replace("4.250000", "inf"))
    assert (device.utilization_percent, device.power_draw_w) == (12.5, None)


def test_no_prefix_of_the_stream_is_misread_as_idle() -> None:
    for end in range(len(TOP_OLD)):
        try:
            device = read(TOP_OLD[:end])
        except ProbeGarbled:
            continue
        assert device.utilization_percent in (None, 12.5, 37.25)


def test_a_live_reading_ends_the_tool_and_names_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text(TOP_OLD)
    install(tmp_path, monkeypatch, f"cat {tmp_path}/out; exec sleep 600")
    add_card(tmp_path, 1, "0000:03:00.0", "0x56a5")
    (device,) = in_time(10.0, lambda: IntelGpuTop(tmp_path).read(200.0)).devices
    assert (device.id, device.pci_bus_id, device.name) == ("0000:03:00.0", "0000:03:00.0", "Intel Arc A380 Graphics")
    assert device.utilization_percent == 37.25


def test_without_a_listed_card_the_tool_decides_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text(TOP_OLD)
    install(tmp_path, monkeypatch, f"cat {tmp_path}/out; exec sleep 600")
    (device,) = IntelGpuTop(tmp_path / "nothing").read(20.0).devices
    assert (device.id, device.utilization_percent) == ("intel-0", 37.25)
    install(tmp_path, monkeypatch, "echo 'No device filter specified and no i915 devices found' >&2; exit 1")
    with pytest.raises(ProbeMissing, match="no Intel GPU"):
        IntelGpuTop(tmp_path / "nothing").read(20.0)


def test_cards_are_read_in_turn_and_a_failing_one_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text(TOP_OLD)
    choose = f'case "$*" in *0000:00:02.0*) cat {tmp_path}/out; exec sleep 600;; esac; echo broken >&2; exit 3'
    install(tmp_path, monkeypatch, choose)
    add_card(tmp_path, 0, "0000:03:00.0", "0x56a0")
    add_card(tmp_path, 1, "0000:00:02.0", "0x46a6")
    reading = IntelGpuTop(tmp_path).read(20.0)
    assert [(device.id, device.utilization_percent) for device in reading.devices] == [
        ("0000:00:02.0", 37.25),
        ("0000:03:00.0", None),
    ]
    (problem,) = reading.problems
    assert problem.kind == "crashed"
    assert problem.message.startswith("0000:03:00.0: ")
    assert "broken" in problem.message


def test_if_every_card_fails_the_probe_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "echo broken >&2; exit 3")
    add_card(tmp_path, 0, "0000:03:00.0", "0x56a0")
    add_card(tmp_path, 1, "0000:04:00.0", "0x56a0")
    with pytest.raises(ProbeCrashed, match="broken"):
        IntelGpuTop(tmp_path).read(20.0)


def test_a_card_of_the_xe_driver_is_left_to_another_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "exit 0")
    add_card(tmp_path, 0, "0000:00:02.0", "0x46a6")
    add_card(tmp_path, 1, "0000:03:00.0", "0xe20b", driver="xe")
    with pytest.raises(ProbeError, match=r"does not support 0000:03:00\.0"):
        IntelGpuTop(tmp_path).read(20.0)
