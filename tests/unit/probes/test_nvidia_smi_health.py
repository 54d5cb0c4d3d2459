"""The health of a card as `nvidia-smi -q -x` prints it, in the forms of several drivers."""

import pytest

from gpuyard.model.machine_snapshot import Device, HealthFigures, Throttle
from gpuyard.probes.nvidia.nvidia_smi import parse_xml

CARD = """<nvidia_smi_log><gpu id="00000000:3B:00.0"><uuid>GPU-1</uuid>
<pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
<current_link_width>8x</current_link_width></link_widths></pci_gpu_link_info></pci>
<utilization><gpu_util>{load} %</gpu_util></utilization>
{more}</gpu></nvidia_smi_log>"""
NEW = """<clocks_event_reasons><clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_power_brake_slowdown>Active</clocks_event_reason_hw_power_brake_slowdown>
</clocks_event_reasons>
<ecc_errors><volatile><sram_correctable>7</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>2</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending>
<remapped_row_failure>No</remapped_row_failure></remapped_rows>"""
OLD = """<clocks_throttle_reasons>
<clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
</clocks_throttle_reasons>
<ecc_errors><volatile><double_bit><total>4</total></double_bit></volatile></ecc_errors>
<remapped_rows>N/A</remapped_rows>"""
NONE = """<clocks_event_reasons>N/A</clocks_event_reasons>
<ecc_errors><volatile><sram_uncorrectable>N/A</sram_uncorrectable></volatile></ecc_errors>"""


def read(more: str, load: int = 50) -> HealthFigures:
    (device,) = parse_xml(CARD.format(more=more, load=load)).devices
    assert isinstance(device, Device)
    assert device.health is not None
    return device.health


def test_the_health_of_a_card_is_read_from_newer_and_older_drivers() -> None:
    assert read(NEW) == HealthFigures(
        ecc_uncorrected=3, remap_pending=True, remap_failed=False,
        throttle=(Throttle.POWER_BRAKE, Throttle.HW_SLOWDOWN), link_width=8, link_width_max=16,
    )  # fmt: skip
    found = read(OLD)
    assert (found.ecc_uncorrected, found.throttle, found.remap_pending) == (4, (Throttle.HW_THERMAL,), None)
    assert read("", load=0).link_width is None


@pytest.mark.parametrize("more", ["", NONE])
def test_what_is_not_printed_is_unknown(more: str) -> None:
    found = read(more)
    assert (found.ecc_uncorrected, found.remap_failed, found.throttle) == (None, None, None)
