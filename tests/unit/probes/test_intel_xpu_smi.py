"""`xpu-smi`: CSV and JSON of several releases, and a live reading combined from four calls."""

import json
from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed, ProbeGarbled, ProbeMissing, ProbeTimeout
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.probes.intel.xpu_smi import XpuSmi, parse
from tests.executables import write_executable
from tests.unit.probes.samples_intel import DISCOVERY_CSV, DISCOVERY_JSON, DUMP_2, DUMP_NEW, PS_JSON


def read(text: str) -> Device:
    (device,) = parse(text).devices
    return device


def load(device: Device) -> tuple[float | None, float | None, float | None, float | None]:
    return device.utilization_percent, device.power_draw_w, device.temperature_c, device.memory_used_mb


@pytest.mark.parametrize("dump", [DUMP_NEW, DUMP_2], ids=["titles of release 1", "titles of later releases"])
def test_the_last_row_of_each_device_counts(dump: str) -> None:
    first, second = parse(dump).devices
    assert (first.index, load(first)) == (0, (70.25, 91.5, 63.0, 4096.75))
    assert (second.index, load(second)) == (1, (None, 32.0, None, 17.25))


@pytest.mark.parametrize(
    "text",
    [
        "Timestamp, DeviceId, Reset Counter\n1:00, 0, 3\n",
        'Device ID,Vendor Name\n0,"Intel(R) Corporation"\n',
        "Timestamp,DeviceId,TileId,GPU Power (W)\n1:00,0,1,50\n",
    ],
)
def test_a_csv_without_a_known_column_is_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled, match="no column"):
        parse(text)


def test_only_complete_rows_count_and_blank_fields_are_unknown() -> None:
    device = read(
        "Timestamp, DeviceId, GPU Power (W), GPU Core Temperature (Celsius Degree)\n18:38:50.000,    0, 43.72,"
    )
    assert (device.power_draw_w, device.temperature_c) == (43.72, None)
    first, _ = parse(DUMP_NEW + "09:10:13.000,    0, 1.0\n09:10:13.000,    2, 25.00, 9").devices
    assert first.utilization_percent == 70.25


def test_text_without_figures_is_refused() -> None:
    with pytest.raises(ProbeGarbled, match="no rows"):
        parse("Timestamp, DeviceId, GPU Power (W)\n")
    with pytest.raises(ProbeGarbled, match="Device not found"):
        parse('{"error": "Device not found", "errno": 22}')


def test_discovery_gives_identity_and_memory() -> None:
    first, second = parse(DISCOVERY_JSON).devices
    assert (first.id, first.pci_bus_id) == ("00000000-0000-004d-0000-000056c08086", "0000:4d:00.0")
    assert (first.name, first.memory_total_mb) == ("Intel(R) Data Center GPU Flex 170", None)
    assert (second.id, second.memory_total_mb) == ("0000:9a:00.0", 16288.0)
    entry = {"uuid": "00000000-0000-0000-0000-020a00008086", "device_id": 0}
    two = [entry | {"pci_bdf_address": "0000:1a:00.0"}, entry | {"pci_bdf_address": "0000:1b:00.0", "device_id": 1}]
    assert [device.id for device in parse(json.dumps({"device_list": two})).devices] == ["0000:1a:00.0", "0000:1b:00.0"]
    first, second = parse(DISCOVERY_CSV).devices
    assert (first.memory_total_mb, second.memory_total_mb) == (None, 14260.97)


def test_json_processes_are_parsed_and_an_empty_list_has_no_device() -> None:
    assert read(PS_JSON).processes == (
        Process(pid=3010, memory_mb=1024.0, name="python3"),
        Process(pid=5151, memory_mb=1.92, name="xpu-smi"),
    )
    assert parse('{"device_util_by_proc_list": []}').devices == ()


VERSION = """CLI:
    Version: {}.20260114.071500
    Build ID: 1a2b3c4d

Service:
    Version: 1.3.6.20260114.071500
    Level Zero Version: 1.20.2
"""


class StandIn:
    """An `xpu-smi` on PATH that prints a file per subcommand and records its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tool = folder / "xpu-smi"
        write_executable(
            tool,
            f'#!/bin/sh\necho "$*" >> {folder}/calls\nkey="$1"\n[ "$2" = --dump ] && key=sizes\n'
            f"[ $1 = -v ] && key=version\n"
            f'[ -x {folder}/$key ] && exec {folder}/$key "$@"\ncat {folder}/$key || exit 5\n',
        )
        self.prints(
            version=VERSION.format("1.3.6"), discovery=DISCOVERY_JSON, sizes=DISCOVERY_CSV, dump=DUMP_NEW, ps=PS_JSON
        )

    def prints(self, **outputs: str) -> None:
        for key, text in outputs.items():
            (self.folder / key).write_text(text)

    def do(self, key: str, script: str) -> None:
        write_executable(self.folder / key, f"#!/bin/sh\n{script}\n")

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return StandIn(tmp_path)


def test_a_live_reading_combines_identity_figures_and_processes(stand_in: StandIn) -> None:
    first, second = XpuSmi().read(20.0).devices
    assert (first.id, first.name) == ("00000000-0000-004d-0000-000056c08086", "Intel(R) Data Center GPU Flex 170")
    assert load(first) == (70.25, 91.5, 63.0, 4096.75)
    assert first.processes == (Process(pid=3010, memory_mb=1024.0, name="python3"),)
    assert (second.memory_total_mb, second.memory_used_mb, second.memory_free_mb) == (16288.0, 17.25, 16270.75)
    assert second.processes == ()
    stand_in.prints(ps=PS_JSON.replace("1048576", "7876608"))
    assert XpuSmi().read(20.0).devices[0].processes == (Process(pid=3010, name="python3"),)


def test_the_identity_of_devices_is_queried_once(stand_in: StandIn) -> None:
    probe = XpuSmi()
    probe.read(20.0)
    probe.read(20.0)
    calls = [call.split()[0] for call in stand_in.calls()]
    assert calls == ["discovery", "discovery", "dump", "ps", "dump", "ps"]
    assert "dump -d 0,1 -m 0,1,3,18 -i 1 -n 1" in stand_in.calls()


def test_without_a_list_of_processes_or_sizes_the_other_figures_are_still_read(stand_in: StandIn) -> None:
    stand_in.do("ps", "echo no sysman >&2; exit 9")
    reading = XpuSmi().read(20.0)
    assert [device.processes for device in reading.devices] == [None, None]
    assert reading.devices[0].power_draw_w == 91.5
    assert ["no sysman" in problem.message for problem in reading.problems] == [True]
    stand_in.do("sizes", "echo 'unknown option --dump' >&2; exit 106")
    first, second = XpuSmi().read(20.0).devices
    assert (first.memory_total_mb, second.memory_total_mb) == (None, 16288.0)


def test_a_release_without_short_options_is_called_with_long_options_afterwards(stand_in: StandIn) -> None:
    stand_in.prints(dump2=DUMP_2)
    stand_in.do("dump", f"case \"$*\" in *' -m '*) exit 4 ;; esac\ncat {stand_in.folder}/dump2")
    probe = XpuSmi()
    assert load(probe.read(20.0).devices[0]) == load(probe.read(20.0).devices[0]) == (70.25, 91.5, 63.0, 4096.75)
    assert [call for call in stand_in.calls() if call.startswith("dump")] == [
        "dump -d 0,1 -m 0,1,3,18 -i 1 -n 1",
        "dump --metrics 0,1,3,18 --interval 1 --number 1",
        "dump --metrics 0,1,3,18 --interval 1 --number 1",
    ]


def test_after_a_failure_the_devices_are_queried_again(stand_in: StandIn) -> None:
    probe = XpuSmi()
    probe.read(20.0)
    stand_in.do("dump", "echo 'Error: Device not found'; exit 22")
    with pytest.raises(ProbeCrashed, match="Device not found"):
        probe.read(20.0)
    stand_in.prints(dump=DUMP_NEW, discovery=json.dumps({"device_list": json.loads(DISCOVERY_JSON)["device_list"][:1]}))
    (stand_in.folder / "dump").chmod(0o644)
    assert len(probe.read(20.0).devices) == 1


def test_results_before_a_timeout_are_not_queried_again(stand_in: StandIn) -> None:
    probe = XpuSmi()
    stand_in.do("dump", "exec sleep 600")
    with pytest.raises(ProbeTimeout):
        probe.read(1.0)
    stand_in.prints(dump=DUMP_NEW)
    (stand_in.folder / "dump").chmod(0o644)
    probe.read(20.0)
    assert stand_in.calls().count("discovery -j") == 1


def test_a_machine_without_intel_devices_is_reported(stand_in: StandIn) -> None:
    stand_in.prints(discovery='{"device_list": []}')
    with pytest.raises(ProbeMissing, match="no Intel GPU"):
        XpuSmi().read(20.0)
