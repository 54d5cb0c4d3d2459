import pytest

from gpuyard.core.model import Process
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.nvidia.smi_csv import parse_apps, parse_csv
from tests.unit.probes.samples_nvidia import (
    APPS,
    APPS_WITHOUT_CARD,
    CSV,
    HEADERLESS_CSV,
    LOST_CSV,
    LOST_LINE,
    NO_UNITS_CSV,
    UNKNOWN_COLUMNS_CSV,
    XML,
)


def test_the_header_says_which_column_is_which() -> None:
    one, two = parse_csv(CSV).devices
    assert (one.index, one.name, one.memory_total_mb, one.memory_used_mb) == (0, "NVIDIA Yard One", 24576, 4096)
    assert (one.utilization_percent, one.power_draw_w, one.power_limit_w, one.temperature_c) == (37, 201.5, 350, 61)
    assert (two.memory_used_mb, two.utilization_percent, two.power_draw_w, two.power_limit_w) == (0, None, None, None)


def test_values_without_units_are_read_alike() -> None:
    (one,) = parse_csv(NO_UNITS_CSV).devices
    assert (one.memory_total_mb, one.utilization_percent, one.power_draw_w, one.power_limit_w) == (
        24576,
        37,
        201.5,
        350,
    )
    assert (one.id, one.temperature_c, one.processes) == ("nvidia-0", None, None)


def test_the_usual_columns_are_known_without_a_header() -> None:
    one, two = parse_csv(HEADERLESS_CSV).devices
    assert (one.name, one.temperature_c, one.memory_used_mb, one.memory_total_mb) == (
        "NVIDIA Yard One",
        61,
        4096,
        24576,
    )
    assert (two.index, two.utilization_percent, two.power_draw_w) == (1, None, None)


def test_unknown_columns_without_a_header_stay_unknown_and_are_pointed_out() -> None:
    reading = parse_csv(UNKNOWN_COLUMNS_CSV)
    (one,) = reading.devices
    assert (one.name, one.pci_bus_id, one.memory_total_mb) == ("NVIDIA Yard One", "00000000:3B:00.0", None)
    assert "header" in reading.problems[0].message


def test_a_row_of_nothing_but_unknowns_is_a_device_of_which_nothing_is_known() -> None:
    (one,) = parse_csv("[N/A], [N/A], [N/A]\n").devices
    assert (one.memory_total_mb, one.utilization_percent, one.name) == (None, None, None)


def test_a_lost_card_is_unhealthy() -> None:
    (field,) = parse_csv(LOST_CSV).devices
    (line,) = parse_csv(LOST_LINE).devices
    assert (field.fault, line.fault) == ("GPU is lost", "GPU is lost.  Reboot to recover this GPU")


@pytest.mark.parametrize("text", ["", "hello, world\n", "a,b\n1,2\n", "1, 2, 3\n", XML, APPS])
def test_what_lists_no_cards_is_refused(text: str) -> None:
    if text == APPS:
        assert parse_csv(text).devices[0].memory_total_mb is None
        return
    with pytest.raises(ProbeGarbled):
        parse_csv(text)


def test_processes_are_listed_under_their_cards() -> None:
    one, two = parse_apps(APPS).devices
    assert one.processes == (
        Process(pid=4242, memory_mb=3800, name="python, with a comma, train.py"),
        Process(pid=77, memory_mb=None, name="Xorg"),
    )
    assert two.processes is not None
    assert two.processes[0].memory_mb == 5


def test_no_processes_are_no_error() -> None:
    assert parse_apps("pid, process_name, used_gpu_memory [MiB]\n").devices == ()


def test_processes_without_a_column_for_their_card_are_of_the_first() -> None:
    (card,) = parse_apps(APPS_WITHOUT_CARD).devices
    assert (card.id, card.processes) == ("nvidia-0", (Process(pid=4242, memory_mb=3800),))


@pytest.mark.parametrize("text", ["", "hello", CSV, "1, 2\n"])
def test_what_lists_no_processes_is_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse_apps(text)
