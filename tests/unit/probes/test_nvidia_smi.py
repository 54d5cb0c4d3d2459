from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed
from gpuyard.model.machine_snapshot import Process
from gpuyard.probes.nvidia.nvidia_smi import NvidiaSmi
from gpuyard.probes.nvidia.nvml_health_and_energy import KernelCard, list_kernel_cards
from tests.unit.probes.samples_nvidia import LOST_LINE, XML

Tools = Callable[[str, str], Path]


def put_smi(tools: Tools, xml: str = "", gpus: str = "", apps: str = "", status: int = 0) -> None:
    tools(
        "nvidia-smi",
        f"import sys\ntext = {apps!r} if 'apps' in sys.argv[1] else {gpus!r} if 'query' in sys.argv[1] else {xml!r}\n"
        f"print(text, end='')\nsys.exit({status})",
    )


def put_in_kernel(root: Path, bus_id: str, uuid: str, name: str) -> None:
    folder = root / "proc/driver/nvidia/gpus" / bus_id
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 11\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n")


def test_one_call_gives_all_figures(tools: Tools) -> None:
    put_smi(tools, xml=XML)
    one, _ = NvidiaSmi().read(10).devices
    assert (one.memory_used_mb, one.power_draw_w) == (4096, 201.5)
    assert one.processes is not None
    assert one.processes[0] == Process(pid=4242, memory_mb=3800, name="python train.py")


def test_an_unreachable_driver_is_a_crash_with_the_message_of_the_tool(tools: Tools) -> None:
    put_smi(tools, xml="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", status=9)
    with pytest.raises(ProbeCrashed, match="couldn't communicate"):
        NvidiaSmi().read(10)


def test_cards_before_a_failure_are_reported_with_it_unless_a_lost_card_explains_it(tools: Tools) -> None:
    put_smi(tools, xml=XML, status=14)
    reading = NvidiaSmi().read(10)
    assert len(reading.devices) == 2
    assert [(problem.kind, "status 14" in problem.message) for problem in reading.problems] == [("crashed", True)]
    put_smi(tools, xml=LOST_LINE.replace("3B", "AA") + XML, status=15)
    reading = NvidiaSmi().read(10)
    assert [device.healthy for device in reading.devices] == [True, True, False]
    assert reading.problems == ()
    put_smi(tools, xml=LOST_LINE, status=15)
    (lost,) = NvidiaSmi().read(10).devices
    assert (lost.id, lost.healthy) == ("0000:3b:00.0", False)


def test_the_kernel_lists_cards_in_order_of_bus_ids(tmp_path: Path) -> None:
    put_in_kernel(tmp_path, "0000:86:00.0", "GPU-????????-????-????-????-????????????", "NVIDIA Two")
    put_in_kernel(tmp_path, "0000:3b:00.0", "GPU-one", "NVIDIA One")
    (tmp_path / "proc/driver/nvidia/gpus/0000:90:00.0").mkdir()
    assert list_kernel_cards(tmp_path) == (
        KernelCard(pci_bus_id="0000:3b:00.0", uuid="GPU-one", name="NVIDIA One"),
        KernelCard(pci_bus_id="0000:86:00.0", uuid=None, name="NVIDIA Two"),
        KernelCard(pci_bus_id="0000:90:00.0"),
    )
    assert list_kernel_cards(tmp_path / "nowhere") == ()
