"""The plists of `powermetrics`."""

import pytest

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.probes.apple_gpu import parse_powermetrics as parse


def plist(idle: str = "0.25", energy: str = "500", extra: str = "") -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n'
        '<plist version="1.0">\n<dict>\n<key>elapsed_ns</key><integer>250000000</integer>\n'
        f"<key>hw_model</key><string>Mac15,6</string>\n{extra}"
        f"<key>gpu</key>\n<dict>\n<key>idle_ratio</key><real>{idle}</real>\n"
        f"<key>gpu_energy</key><integer>{energy}</integer>\n</dict>\n</dict>\n</plist>\n"
    )


def only(output: str) -> Device:
    (device,) = parse(output).devices
    return device


def test_a_plist_gives_name_use_and_power_but_no_memory() -> None:
    assert only(plist()) == Device(
        id="apple-gpu-0", vendor=Vendor.APPLE, index=0, name="Apple GPU (Mac15,6)", utilization_percent=75.0,
        power_draw_w=2.0,
    )  # fmt: skip


def test_power_is_that_of_the_processors_else_energy_over_time() -> None:
    extra = "<key>processor</key>\n<dict>\n<key>gpu_power</key><real>1875.5</real>\n</dict>\n"
    assert only(plist(extra=extra)).power_draw_w == 1.8755
    assert only(plist().replace("250000000", "0")).power_draw_w is None


def test_the_last_of_several_plists_counts_also_with_odd_characters() -> None:
    assert only(f"{plist(idle='0.9')}\0{plist(idle='0.5')}\0{plist(idle='0.1')}").utilization_percent == 90.0
    assert only(f"\0{plist()}").utilization_percent == 75.0
    extra = "<key>tasks</key>\n<array>\n<string>caf\ufffd\x07\x1b</string>\n</array>\n"
    assert only(plist(extra=extra)).utilization_percent == 75.0


@pytest.mark.parametrize("kept", [10, 150, 300, -12])
def test_the_last_complete_plist_counts_if_the_last_is_truncated(kept: int) -> None:
    assert only(f"{plist(idle='0.9')}\0{plist(idle='0.5')}\0{plist(idle='0.1')[:kept]}").utilization_percent == 50.0


@pytest.mark.parametrize("idle", ["1.5", "-0.1", "nan", "inf"])
def test_an_idle_ratio_outside_0_to_1_is_unknown(idle: str) -> None:
    device = only(plist(idle=idle))
    assert device.utilization_percent is None
    assert device.power_draw_w == 2.0


def test_a_plist_without_any_gpu_is_refused() -> None:
    with pytest.raises(ProbeGarbled, match="no whole sample of a GPU"):
        parse(plist().replace("<key>gpu</key>", "<key>disk</key>"))
