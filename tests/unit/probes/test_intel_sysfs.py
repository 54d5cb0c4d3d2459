"""Files of the kernel, in a tree built for the test: cards, energy counters, and clients in `/proc`."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.probes.intel.sysfs import IntelSysfs, parse_fdinfo

ARC = "0000:03:00.0"
INTEGRATED = "0000:00:02.0"


class Machine:
    """A root folder with cards and processes, and a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
        (root / "proc/1/fd").mkdir(parents=True)

    def probe(self) -> IntelSysfs:
        return IntelSysfs(self.root, lambda: self.now)

    def add_card(self, number: int, bus: str, model: str, driver: str = "i915", vendor: str = "0x8086") -> Path:
        folder = self.root / f"sys/devices/pci0000:00/{bus}"
        self.write(folder, vendor=vendor, device=model, uevent=f"DRIVER={driver}\nPCI_SLOT_NAME={bus}")
        node = self.root / f"sys/class/drm/card{number}"
        node.mkdir(parents=True)
        (node / "device").symlink_to(folder)
        (self.root / f"sys/class/drm/card{number}-DP-1").mkdir()
        return folder

    def add_process(self, pid: int, name: str, *fdinfos: str) -> None:
        folder = self.root / f"proc/{pid}"
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        self.write(folder, comm=name)
        for number, text in enumerate(fdinfos, start=3):
            self.write(folder / "fdinfo", **{str(number): text})
            if not (folder / f"fd/{number}").is_symlink():
                (folder / f"fd/{number}").symlink_to("/dev/dri/renderD128")

    @staticmethod
    def write(folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def i915(client: int, render_ns: int, video_ns: int = 0, memory: str = "", bus: str = ARC) -> str:
    return (
        f"pos:\t0\ndrm-driver:\ti915\ndrm-pdev:\t{bus}\ndrm-client-id:\t{client}\n"
        f"drm-engine-render:\t{render_ns} ns\ndrm-engine-video:\t{video_ns} ns\ndrm-engine-capacity-video:\t2\n{memory}"
    )


def only(probe: IntelSysfs) -> Device:
    (device,) = probe.read(10.0).devices
    return device


def test_cards_are_ordered_by_bus_id_and_other_vendors_left_out(machine: Machine) -> None:
    machine.add_card(2, "0000:41:00.0", "0x2330", driver="nvidia", vendor="0x10de")
    with pytest.raises(ProbeMissing, match="sysfs"):
        machine.probe().read(10.0)
    machine.add_card(0, ARC, "0x56a0")
    machine.add_card(1, INTEGRATED, "0x46a6")
    devices = machine.probe().read(10.0).devices
    assert [(device.id, device.index, device.name) for device in devices] == [
        (INTEGRATED, 0, "Intel Graphics [46a6]"),
        (ARC, 1, "Intel Arc A770 Graphics"),
    ]
    assert devices[1].pci_bus_id == ARC


def test_total_memory_is_the_sum_of_tiles_and_integrated_graphics_have_none(machine: Machine) -> None:
    xe = machine.add_card(0, ARC, "0xe20b", driver="xe")
    machine.write(xe / "tile0", physical_vram_size_bytes="6442450944")
    machine.write(xe / "tile1", physical_vram_size_bytes="6442450944")
    integrated = machine.add_card(1, INTEGRATED, "0x46a6")
    machine.write(integrated, lmem_total_bytes="4294967296")
    totals = {device.id: device.memory_total_mb for device in machine.probe().read(10.0).devices}
    assert totals == {ARC: 12288.0, INTEGRATED: None}


def test_total_memory_is_read_from_intels_i915_and_unknown_with_the_mainline_driver(machine: Machine) -> None:
    machine.add_card(0, ARC, "0x56a0")
    assert only(machine.probe()).memory_total_mb is None
    machine.write(machine.root / "sys/class/drm/card0", lmem_total_bytes="17179869184")
    assert only(machine.probe()).memory_total_mb == 16384.0


def test_power_comes_from_the_energy_counter_at_the_second_reading(machine: Machine) -> None:
    folder = machine.add_card(0, ARC, "0x56a0")
    sensors = folder / "hwmon/hwmon4"
    machine.write(sensors, name="i915", energy1_input="5000000", power1_max="190000000", temp1_input="47000")
    probe = machine.probe()
    first = only(probe)
    assert (first.power_draw_w, first.power_limit_w, first.temperature_c) == (None, 190.0, 47.0)
    machine.now += 2.0
    machine.write(sensors, energy1_input="85000000")
    assert only(probe).power_draw_w == 40.0
    machine.now += 2.0
    machine.write(sensors, energy1_input="10")
    assert only(probe).power_draw_w is None, "the counter has decreased"


def test_the_temperature_is_that_of_the_package_and_not_of_parts(machine: Machine) -> None:
    folder = machine.add_card(0, ARC, "0xe20b", driver="xe")
    machine.write(folder / "hwmon/hwmon1", name="xe_gt0", temp1_input="99000")
    machine.write(
        folder / "hwmon/hwmon2", name="xe", temp2_label="vram", temp2_input="70000", temp3_label="pkg",
        temp3_input="55000", power1_max="0",
    )  # fmt: skip
    device = only(machine.probe())
    assert (device.temperature_c, device.power_limit_w) == (55.0, None)


def test_utilisation_is_that_of_the_busiest_engine_between_two_readings(machine: Machine) -> None:
    machine.add_card(0, ARC, "0x56a0")
    machine.add_process(20, "one", i915(7, 1_000_000_000, 0))
    machine.add_process(30, "two", i915(8, 0, 5_000_000_000))
    probe = machine.probe()
    assert only(probe).utilization_percent is None
    machine.now += 2.0
    machine.add_process(20, "one", i915(7, 1_500_000_000, 0))
    machine.add_process(30, "two", i915(8, 300_000_000, 6_000_000_000))
    assert only(probe).utilization_percent == 40.0


def test_xe_cycles_are_divided_by_their_own_total(machine: Machine) -> None:
    machine.add_card(0, ARC, "0xe20b", driver="xe")
    text = (
        f"drm-driver:\txe\ndrm-client-id:\t4\ndrm-pdev:\t{ARC}\n"
        "drm-cycles-ccs:\t{busy}\ndrm-total-cycles-ccs:\t{total}\ndrm-engine-capacity-ccs:\t4\n"
        "drm-cycles-rcs:\t10\ndrm-total-cycles-rcs:\t{total}\n"
    )
    machine.add_process(20, "one", text.format(busy=0, total=1000))
    probe = machine.probe()
    probe.read(10.0)
    machine.now += 1.0
    machine.add_process(20, "one", text.format(busy=2000, total=2000))
    assert only(probe).utilization_percent == 50.0


def test_a_client_shared_by_processes_counts_once(machine: Machine) -> None:
    machine.add_card(0, ARC, "0x56a0")
    memory = "drm-resident-local0:\t512 MiB\ndrm-total-local0:\t2 GiB\ndrm-total-system0:\t64 MiB\n"
    machine.add_process(20, "parent", i915(7, 0, memory=memory), i915(9, 0, memory=memory))
    machine.add_process(21, "child", i915(7, 0, memory=memory))
    assert only(machine.probe()).processes == (Process(pid=20, memory_mb=1024.0, name="parent"),)


def test_clients_belong_to_their_own_card(machine: Machine) -> None:
    machine.add_card(0, ARC, "0x56a0")
    machine.add_card(1, INTEGRATED, "0x46a6")
    machine.add_process(20, "one", i915(7, 0))
    users = {device.id: device.processes for device in machine.probe().read(10.0).devices}
    assert users == {ARC: (Process(pid=20, name="one"),), INTEGRATED: ()}
    (machine.root / "proc/20/fd/3").unlink()
    (machine.root / "proc/20/fd/3").symlink_to("/tmp/file")
    assert {device.processes for device in machine.probe().read(10.0).devices} == {()}, "no file of a card"


@pytest.mark.parametrize("inside", ["a container", "a hidden proc", ""])
def test_only_a_complete_view_shows_an_idle_card(machine: Machine, inside: str) -> None:
    machine.add_card(0, ARC, "0x56a0")
    if inside == "a container":
        (machine.root / "proc/self/ns/pid").unlink()
        (machine.root / "proc/self/ns/pid").symlink_to("pid:[4026532999]")
    elif inside:
        (machine.root / "proc/1/fd").rmdir()
        (machine.root / "proc/1").rmdir()
    probe = machine.probe()
    probe.read(10.0)
    machine.now += 1.0
    device = only(probe)
    assert (device.utilization_percent, device.processes) == ((None, None) if inside else (0.0, ()))


def test_a_partial_view_reports_the_visible_use(machine: Machine) -> None:
    machine.add_card(0, ARC, "0x56a0")
    (machine.root / "proc/self/ns/pid").unlink()
    machine.add_process(20, "one", i915(7, 0))
    probe = machine.probe()
    probe.read(10.0)
    machine.now += 1.0
    machine.add_process(20, "one", i915(7, 250_000_000))
    device = only(probe)
    assert (device.utilization_percent, device.processes) == (25.0, (Process(pid=20, name="one"),))


def test_another_users_process_makes_the_view_partial_no_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add_card(0, ARC, "0x56a0")
    (machine.root / "proc/31").mkdir()
    assert only(machine.probe()).processes == ()
    list_folder = os.listdir

    def refuse(folder: Path) -> list[str]:
        if folder == machine.root / "proc/31/fd":
            raise PermissionError(folder)
        return list_folder(folder)

    monkeypatch.setattr(os, "listdir", refuse)
    assert only(machine.probe()).processes is None


@pytest.mark.parametrize(
    ("lines", "memory"),
    [
        ("drm-total-vram0:\t3072 KiB\n", 3.0),
        ("drm-total-vram0:\t8 MiB\ndrm-resident-vram0:\t4194304\ndrm-resident-vram1:\t1 MiB\n", 5.0),
        ("drm-total-system:\t8 MiB\ndrm-resident-gtt:\t8 MiB\n", None),
        ("drm-total-vram0:\t\n", None),
    ],
)
def test_the_memory_of_a_client_is_its_device_memory(lines: str, memory: float | None) -> None:
    client = parse_fdinfo(f"drm-driver:\txe\ndrm-client-id:\t4\n{lines}", 9)
    assert client is not None
    assert client.process.memory_mb == memory


@pytest.mark.parametrize("text", ["", "pos:\t0\n", "drm-driver:\tamdgpu\ndrm-client-id:\t4\n", "drm-driver:\txe\n"])
def test_other_files_have_no_client(text: str) -> None:
    assert parse_fdinfo(text, 9) is None
