"""`powermetrics` in its plist form and in the text forms of several macOS releases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.snapshot import Device, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.apple.powermetrics import parse


def plist(idle: str = "0.25", energy: str = "500", extra: str = "") -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n'
        '<plist version="1.0">\n<dict>\n<key>elapsed_ns</key><integer>250000000</integer>\n'
        f"<key>hw_model</key><string>Mac15,6</string>\n{extra}"
        f"<key>gpu</key>\n<dict>\n<key>idle_ratio</key><real>{idle}</real>\n"
        f"<key>gpu_energy</key><integer>{energy}</integer>\n</dict>\n</dict>\n</plist>\n"
    )


def text(gpu: str, processor: str = "") -> str:
    return (
        "*** Sampled system activity (Mon Jan  1 00:00:00 2024 +0000) (200.00ms elapsed) ***\n\n"
        f"**** Processor usage ****\n\n{processor}\n\n**** GPU usage ****\n\n{gpu}\n"
    )


def only(output: str) -> Device:
    (device,) = parse(output).devices
    return device


def test_a_plist_gives_name_use_and_power_but_no_memory() -> None:
    assert only(plist()) == Device(
        id="apple-gpu-0",
        vendor=Vendor.APPLE,
        index=0,
        name="Apple GPU (Mac15,6)",
        utilization_percent=75.0,
        power_draw_w=2.0,
    )


def test_the_processors_power_figure_is_preferred_to_energy_over_time() -> None:
    extra = "<key>processor</key>\n<dict>\n<key>gpu_power</key><real>1875.5</real>\n</dict>\n"
    assert only(plist(extra=extra)).power_draw_w == 1.8755


def test_energy_without_a_duration_gives_no_power() -> None:
    assert only(plist().replace("250000000", "0")).power_draw_w is None


def test_the_last_of_several_plists_counts() -> None:
    assert only(f"{plist(idle='0.9')}\0{plist(idle='0.5')}\0{plist(idle='0.1')}").utilization_percent == 90.0


def test_a_plist_after_a_nul_byte_is_parsed() -> None:
    assert only(f"\0{plist()}").utilization_percent == 75.0


@pytest.mark.parametrize("kept", [10, 150, 300, -12])
def test_the_last_complete_plist_counts_if_the_last_is_truncated(kept: int) -> None:
    assert only(f"{plist(idle='0.9')}\0{plist(idle='0.5')}\0{plist(idle='0.1')[:kept]}").utilization_percent == 50.0


def test_names_with_undecodable_and_control_characters_are_tolerated() -> None:
    extra = "<key>tasks</key>\n<array>\n<string>caf\ufffd\x07\x1b</string>\n</array>\n"
    assert only(plist(extra=extra)).utilization_percent == 75.0


@pytest.mark.parametrize("idle", ["1.5", "-0.1", "nan", "inf"])
def test_an_idle_ratio_outside_0_to_1_is_unknown(idle: str) -> None:
    device = only(plist(idle=idle))
    assert device.utilization_percent is None
    assert device.power_draw_w == 2.0


def test_a_plist_without_any_gpu_is_refused() -> None:
    with pytest.raises(ProbeGarbled, match="no whole sample of a GPU"):
        parse(plist().replace("<key>gpu</key>", "<key>disk</key>"))


def test_the_plist_of_an_intel_mac_gives_the_use_of_its_gpu() -> None:
    intel = (
        "<key>GPU</key>\n<array>\n<dict>\n<key>name</key><string>IntelIG</string>\n<key>misc_counters</key>\n<dict>\n"
        "<key>GPU Busy                     :</key><string>23.45%</string>\n</dict>\n</dict>\n</array>\n"
    )
    device = only(plist(extra=intel).replace("<key>gpu</key>", "<key>disk</key>"))
    assert (device.name, device.utilization_percent, device.power_draw_w) == ("IntelIG (Mac15,6)", 23.45, None)


@pytest.mark.parametrize(
    ("line", "busy"),
    [
        ("GPU active residency:  64.20% (396 MHz:   0% 1278 MHz:  64%)", 64.2),
        ("GPU HW active residency:   2.21% (389 MHz: .09%)", 2.21),
        ("GPU HW active residency:   .97% (389 MHz: .97%)", 0.97),
        ("GPU HW active residency: 100.00% (389 MHz: 100%)", 100.0),
        ("GPU idle residency:  35.80%", 64.2),
        ("GPU HW active residency:   2.2", None),
    ],
)
def test_the_residency_line_of_each_release_is_parsed(line: str, busy: float | None) -> None:
    assert only(text(f"{line}\nGPU Power: 16 mW")).utilization_percent == busy


def test_the_power_figure_in_the_gpu_section_takes_precedence() -> None:
    device = only(text("GPU active residency: 5.00%\nGPU Power: 7516 mW", processor="GPU Power: 7539 mW"))
    assert device.power_draw_w == 7.516


def test_the_processors_figure_is_the_fallback_without_a_gpu_section() -> None:
    output = text("", processor="GPU Power: 7539 mW\nCombined Power (CPU + GPU + ANE): 8000 mW")
    device = only(output.partition("**** GPU usage")[0])
    assert (device.utilization_percent, device.power_draw_w) == (None, 7.539)


def test_the_machine_model_in_the_header_names_the_gpu() -> None:
    assert only("Machine model: Mac13,1\n\n" + text("GPU Power: 1 mW")).name == "Apple GPU (Mac13,1)"


def test_a_process_name_that_mentions_a_gpu_is_not_a_figure() -> None:
    output = text("GPU Power: 1 mW").replace("usage ****\n", "usage ****\n  Helper (GPU)  53965  GPU Power: 9 mW\n", 1)
    assert only(output).power_draw_w == 0.001


def test_the_last_sample_with_figures_counts() -> None:
    first = text("GPU active residency: 10.00%\nGPU Power: 100 mW")
    second = text("GPU active residency: 20.00%\nGPU Power: 200 mW")
    assert only(first + second + text("")).utilization_percent == 20.0


def test_the_last_complete_sample_counts_if_the_last_is_truncated() -> None:
    first = text("GPU active residency: 10.00%\nGPU Power: 100 mW")
    second = text("GPU active residency: 20.00%\nGPU Power: 2")
    device = only(first + second)
    assert (device.utilization_percent, device.power_draw_w) == (10.0, 0.1)


EXCERPT = (
    "GPU HW active frequency: 444 MHz\n"
    "GPU HW active residency:  12.50% (338 MHz: 12% 618 MHz:   0%)\n"
    "GPU idle residency:  87.50%\n"
    "GPU Power: 45 mW\n"
)


@pytest.mark.parametrize(
    ("excerpt", "busy", "power"),
    [
        (EXCERPT, 12.5, 0.045),
        ("\n    " + EXCERPT.replace("\n", "\r\n    "), 12.5, 0.045),
        ("*** Sampled system activity (today) (200.00ms elapsed) ***\n\n" + EXCERPT, 12.5, 0.045),
        ("GPU idle residency:  35.80%\n", 64.2, None),
        ("CPU Power: 8916 mW\nGPU Power: 9462 mW\nCombined Power (CPU + GPU + ANE): 18378 mW\n", None, 9.462),
        ("**** Processor usage ****\n\nCPU Power: 8 mW\nGPU Power: 9 mW\n", None, 0.009),
        ("GPU Power: 99 mW\nANE Power: 0 mW\n" + EXCERPT, 12.5, 0.045),
        ("GPU 0 name IntelIG\nGPU 0 C-state residency: 87.50% (2.50%)\nGPU 0 GPU Busy      : 12.50%\n", 12.5, None),
    ],
    ids=["the section", "indented", "no heading of the section", "one line", "the sums", "another section",
         "the sums and the section", "Intel"],
)  # fmt: skip
def test_an_excerpt_without_its_heading_is_parsed(excerpt: str, busy: float | None, power: float | None) -> None:
    device = only(excerpt)
    assert (device.id, device.utilization_percent, device.power_draw_w) == ("apple-gpu-0", busy, power)


def test_the_last_complete_sample_of_an_excerpt_counts() -> None:
    later = EXCERPT.replace("12.50%", "50.00%").replace("45 mW", "90 mW")
    cut = "GPU HW active residency:  99.00% (338"
    for heading in ("", "**** GPU usage ****\n\n"):
        device = only(heading + EXCERPT + heading + later + heading + cut)
        assert (device.utilization_percent, device.power_draw_w) == (50.0, 0.09)


def test_an_incomplete_first_sample_is_not_mixed_with_the_next() -> None:
    device = only("GPU Power: 7 mW\n" + EXCERPT + EXCERPT.partition("GPU Power")[0].replace("12.50%", "50.00%"))
    assert (device.utilization_percent, device.power_draw_w) == (12.5, 0.045)


@pytest.mark.parametrize(
    "prose",
    [
        "GPU Power: 5 mW is what an idle Mac draws.\n",
        "GPU HW active residency: 5% of the time\n",
        "GPU 0 name\n",
        "GPU 0 is the first one\nGPU 1 name of a friend\n",
        "CPU Power: 8916 mW\n",
        "GPU Power: 5\n",
    ],
)
def test_prose_that_mentions_a_gpu_is_not_an_excerpt(prose: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse(prose)


def test_the_numbered_lines_of_an_intel_mac_are_parsed() -> None:
    device = only(
        "Machine model: MacBookPro16,2\n"
        + text(
            "GPU 0 name IntelIG\nGPU 0 C-state residency: 99.28% (0.20%, 99.08%)\n"
            "GPU 0 GPU Busy                     : 0.72%\nGPU 0 [PSR] GPU + TCON are On      : 99.92%"
        )
    )
    assert (device.name, device.utilization_percent, device.power_draw_w) == ("IntelIG (MacBookPro16,2)", 0.72, None)


def test_older_releases_on_intel_macs_report_only_idle_states() -> None:
    output = text("GPU 0 name IntelIG\nGPU 0 C-state residency: 60.00% (60.00%)\nGPU 1 name Other")
    first, second = parse(output).devices
    assert (first.id, first.utilization_percent) == ("apple-gpu-0", 40.0)
    assert (second.id, second.name, second.utilization_percent) == ("apple-gpu-1", "Other", None)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "\0",
        "# A tool\n\nIt reads the GPU Power: 5 mW of a Mac.\n",
        "<plist",
        '<plist version="1.0"><dict></dict></plist>',
        '<plist version="1.0"><array><string>gpu</string></array></plist>',
        '{"gpu": {"idle_ratio": 0.5}}',
        '<?xml version="1.0"?><nvidia_smi_log><gpu/></nvidia_smi_log>',
        text(""),
    ],
)
def test_other_text_is_refused_with_a_message_of_one_line(output: str) -> None:
    with pytest.raises(ProbeGarbled) as refusal:
        parse(output)
    assert refusal.value.source == "powermetrics"
    assert "\n" not in refusal.value.message


@given(st.text(), st.integers(min_value=0, max_value=600), st.integers(min_value=0, max_value=60))
def test_damaged_output_gives_devices_or_a_garbled_error(noise: str, start: int, length: int) -> None:
    for whole in (plist(), text("GPU active residency: 5.00%\nGPU Power: 7 mW")):
        try:
            devices = parse(whole[:start] + noise + whole[start + length :]).devices
        except ProbeGarbled:
            continue
        assert all(device.memory_total_mb is None for device in devices)
