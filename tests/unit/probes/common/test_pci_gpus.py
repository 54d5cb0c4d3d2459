from pathlib import Path

from gpuyard.model.machine_snapshot import Vendor
from gpuyard.probes.kernel_files import gpus_on_pci, vendors_on_pci


def plug_in(root: Path, slot: str, vendor: str, device_class: str) -> None:
    folder = root / "sys/bus/pci/devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{device_class}\n")


def test_graphics_cards_and_accelerators_of_known_vendors_are_found(tmp_path: Path) -> None:
    plug_in(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    plug_in(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its audio function
    plug_in(tmp_path, "0000:03:00.0", "0x1002", "0x120000")
    plug_in(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    plug_in(tmp_path, "0000:00:1f.0", "0x8086", "0x060100")  # a bridge
    plug_in(tmp_path, "0000:00:0b.0", "0x8086", "0x120000")  # an NPU
    plug_in(tmp_path, "0000:4d:00.0", "0x8086", "0x038000")
    plug_in(tmp_path, "0000:05:00.0", "0x1af4", "0x030000")  # a virtual screen
    assert gpus_on_pci(tmp_path) == {
        "0000:00:02.0": Vendor.INTEL, "0000:4d:00.0": Vendor.INTEL, "0000:01:00.0": Vendor.NVIDIA,
        "0000:03:00.0": Vendor.AMD,
    }  # fmt: skip
    assert vendors_on_pci(tmp_path) == {Vendor.INTEL, Vendor.NVIDIA, Vendor.AMD}


def test_without_a_pci_bus_there_are_no_gpus(tmp_path: Path) -> None:
    assert gpus_on_pci(tmp_path) == {}
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    assert gpus_on_pci(tmp_path) == {}
