"""The tree of accelerators that `ioreg` prints."""

import pytest

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.probes.apple_gpu import parse_ioreg as parse

M3 = (
    "+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x10000047b, registered, matched, active, retain 88>\n"
    "    {\n"
    '      "gpu-core-count" = 18\n'
    '      "PerformanceStatistics" = {"In use system memory (driver)"=4096000,"Alloc system memory"=9663676416,'
    '"Tiler Utilization %"=11,"Device Utilization %"=42,"In use system memory"=1610612736}\n'
    '      "model" = "Apple M3 Pro"\n'
    "    }\n"
)


def only(output: str) -> Device:
    (device,) = parse(output).devices
    return device


def with_statistics(statistics: str) -> str:
    return f'+-o X  <class XAccelerator, id 0x1>\n    {{\n      "PerformanceStatistics" = {statistics}\n    }}\n'


def test_apple_silicon_reports_name_use_and_used_memory_but_no_total() -> None:
    assert only(M3) == Device(
        id="apple-gpu-0", vendor=Vendor.APPLE, index=0, name="Apple M3 Pro", memory_used_mb=1536.0,
        utilization_percent=42.0,
    )  # fmt: skip
    assert only(with_statistics('{"In use system memory"=0}')).memory_used_mb == 0.0
    assert only(M3.replace('"model"', '"IOClass"')).name == "AGXAcceleratorG15X"
    device = only('"PerformanceStatistics" = {"Device Utilization %"=16}\n')
    assert (device.name, device.utilization_percent) == (None, 16.0)
    assert only(with_statistics('{"Device Utilization %"=113}')).utilization_percent == 100.0
    assert (
        len(parse(M3 + "  +-o AGXDeviceUserClient  <class AGXDeviceUserClient, id 0x4>\n    {\n    }\n").devices) == 1
    )


@pytest.mark.parametrize("other", ["In use system memory (driver)", "Alloc system memory"])
def test_other_memory_figures_are_not_used(other: str) -> None:
    assert only(with_statistics(f'{{"{other}"=1610612736,"Device Utilization %"=1}}')).memory_used_mb is None


@pytest.mark.parametrize("prefix", ["", "  ", "  | |   ", "    | | | ", "|"])
def test_the_drawn_lines_of_the_tree_are_ignored(prefix: str) -> None:
    output = "".join(f"{prefix}{line}\n" for line in M3.splitlines())
    assert only(output).memory_used_mb == 1536.0
    assert only(output).name == "Apple M3 Pro"


def test_only_complete_statistics_of_the_node_itself_count() -> None:
    output = (
        "+-o X  <class XAccelerator, id 0x1>\n"
        '  "IOCompatibilityProperties" = {"PerformanceStatistics"={"vramFreeBytes"=15728640}}\n'
        '  "PerformanceStatisticsAccum" = {"Device Utilization %"=99}\n'
    )
    assert only(output) == Device(id="apple-gpu-0", vendor=Vendor.APPLE, index=0, name="XAccelerator")
    inner = '{"a"={"Device Utilization %"=1},"b"=(1,{"In use system memory"=2}),"c"="x{","Device Utilization %"=30}'
    device = only(with_statistics(inner))
    assert (device.utilization_percent, device.memory_used_mb) == (30.0, None)
    assert only(M3[: M3.index("1610612736") + 4]).memory_used_mb is None
    assert only(M3[: M3.index("1610612736") + 4]).utilization_percent == 42.0
