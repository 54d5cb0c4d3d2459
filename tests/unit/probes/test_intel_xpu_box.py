"""The box that `xpu-smi` prints without arguments since 2.0."""

import pytest

from gpuyard.core.snapshot import Device, Process, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.intel.xpu_smi import parse
from tests.unit.probes.samples_intel import BOX


def test_each_card_has_its_figures_and_its_complete_name() -> None:
    first, second = parse(BOX).devices
    assert first == Device(
        id="0000:23:00.0",
        vendor=Vendor.INTEL,
        index=0,
        name="Intel(R) Arc(TM) Pro B60 Graphics",
        pci_bus_id="0000:23:00.0",
        memory_total_mb=24480.0,
        memory_used_mb=3642.0,
        memory_free_mb=20838.0,
        utilization_percent=35.0,
        power_draw_w=43.0,
        power_limit_w=200.0,
        temperature_c=48.0,
        processes=(Process(pid=3010, memory_mb=3300.0, name="my long name"), Process(pid=4100, name="firefox"),
                   Process(pid=5151, name="xpu-smi")),
    )  # fmt: skip
    assert (second.index, second.name, second.memory_used_mb) == (1, "Intel(R) Arc(TM) A770 Graphics", 25.0)
    assert (second.utilization_percent, second.power_draw_w, second.power_limit_w, second.temperature_c) == (None,) * 4
    assert second.processes == ()


def test_a_name_that_fits_its_column_has_no_second_line() -> None:
    lines = [line for line in BOX.splitlines() if "60 Graphics" not in line]
    assert parse("\n".join(lines)).devices[0].name == "Intel(R) Arc(TM) Pro B"


def test_a_missing_limit_is_unknown() -> None:
    for printed, draw in (("43W / N/A ", 43.0), ("N/A / N/A ", None)):
        first = parse(BOX.replace("43W / 200W", printed)).devices[0]
        assert (first.power_draw_w, first.power_limit_w, first.temperature_c) == (draw, None, 48.0)


def test_processes_are_unknown_if_their_list_is_missing_or_truncated() -> None:
    for end in ("4100", "Processes:", "GPU Memory Usage |"):
        text = BOX[: BOX.index(end) + len(end)]
        assert [device.processes for device in parse(text).devices] == [None, None]


def test_an_empty_process_list_means_no_processes() -> None:
    lines = [line for line in BOX.splitlines() if not line.endswith(("MiB |", "N/A |")) or "Arc" in line]
    assert [device.processes for device in parse("\n".join(lines)).devices] == [(), ()]


def test_a_card_with_truncated_figures_has_unknown_figures() -> None:
    (card,) = parse(BOX[: BOX.index("60 Graphics")]).devices
    assert (card.index, card.pci_bus_id, card.memory_total_mb) == (0, "0000:23:00.0", None)


def test_a_box_without_cards_is_refused() -> None:
    with pytest.raises(ProbeGarbled, match="no rows"):
        parse(BOX[: BOX.index("|   0  Intel")])


def test_the_box_of_nvidia_smi_is_refused() -> None:
    with pytest.raises(ProbeGarbled, match="nvidia-smi"):
        parse(BOX.replace("Temp  Pwr:Usage/Cap", "Temp  Perf  Pwr:Usage/Cap"))
