import pytest

from gpuyard.core.snapshot import Process
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.nvidia.nvidia_smi_csv import parse_apps, parse_csv
from tests.unit.probes.samples_nvidia import (
    APPS,
    APPS_WITHOUT_CARD,
    APPS_WITHOUT_HEADER,
    CSV,
    HEADERLESS_CSV,
    HEADERLESS_UNITS_CSV,
    LOOP_CSV,
    LOST_CSV,
    LOST_LINE,
    NO_UNITS_CSV,
    OTHER_ORDER_CSV,
    UNKNOWN_COLUMNS_CSV,
    XML,
)


def test_columns_are_identified_by_the_header() -> None:
    one, two = parse_csv(CSV).devices
    assert (one.index, one.name, one.memory_total_mb, one.memory_used_mb) == (0, "NVIDIA Test One", 24576, 4096)
    assert (one.utilization_percent, one.power_draw_w, one.power_limit_w, one.temperature_c) == (37, 201.5, 350, 61)
    assert (two.memory_used_mb, two.utilization_percent, two.power_draw_w, two.power_limit_w) == (0, None, None, None)


def test_values_without_units_are_parsed_too() -> None:
    (one,) = parse_csv(NO_UNITS_CSV).devices
    assert (one.memory_total_mb, one.utilization_percent, one.power_draw_w, one.power_limit_w) == (
        24576,
        37,
        201.5,
        350,
    )
    assert (one.id, one.temperature_c, one.processes) == ("nvidia-0", None, None)


def test_the_usual_columns_are_recognised_without_a_header_and_the_guess_is_reported() -> None:
    reading = parse_csv(HEADERLESS_UNITS_CSV)
    one, two = reading.devices
    assert (one.name, one.temperature_c, one.memory_used_mb, one.memory_total_mb) == (
        "NVIDIA Test One",
        61,
        4096,
        24576,
    )
    assert (one.utilization_percent, one.power_draw_w) == (37, 201.5)
    assert (two.index, two.utilization_percent, two.power_draw_w) == (1, None, None)
    (problem,) = reading.problems
    assert "taken for index, name, temperature.gpu" in problem.message


def test_ambiguous_temperature_and_utilization_are_unknown() -> None:
    reading = parse_csv(HEADERLESS_CSV)
    one, two = reading.devices
    assert (one.name, one.memory_used_mb, one.memory_total_mb, one.power_draw_w) == (
        "NVIDIA Test One",
        4096,
        24576,
        201.5,
    )
    assert {(card.temperature_c, card.utilization_percent) for card in (one, two)} == {(None, None)}
    assert "swapped" in reading.problems[0].message


@pytest.mark.parametrize(
    "row",
    [
        OTHER_ORDER_CSV,
        "0, NVIDIA Test One, 12287, 4096, 8191, 37, 61",
        "0, NVIDIA Test One, 4096, 12287, 37, 61, 201.50",
        "0, NVIDIA Test One, 61, 37, 4096, 12287, 201.50",
        "0, NVIDIA Test One, 37 %, 4096 MiB, 12287 MiB, 61, 201.50 W",
        "0, NVIDIA Test One, 61, 12287, 4096, 37, 201.50",
        "0, NVIDIA Test One, 61, 4096, 12287, 201.50, 37",
        "0, 00000000:3B:00.0, 61, 4096, 12287, 37, 201.50",
    ],
    ids=[
        "a UUID second",
        "total first, temperature last",
        "memory first",
        "memory last",
        "units",
        "used above total",
        "power before utilization",
        "a bus id second",
    ],
)
def test_seven_columns_in_another_order_give_no_figures_and_a_hint(row: str) -> None:
    reading = parse_csv(f"{row}\n")
    (card,) = reading.devices
    assert card.name in ("NVIDIA Test One", None)
    figures = (
        card.memory_total_mb,
        card.memory_used_mb,
        card.memory_free_mb,
        card.utilization_percent,
        card.power_draw_w,
        card.temperature_c,
    )
    assert figures == (None,) * 6
    (problem,) = reading.problems
    assert problem.hint is not None
    assert "leave out `noheader`" in problem.hint
    assert "first line" in problem.hint


def test_a_first_line_with_column_names_is_enough() -> None:
    columns = "index,uuid,name,temperature.gpu,utilization.gpu,memory.used,memory.total\n"
    reading = parse_csv(columns + OTHER_ORDER_CSV)
    (card,) = reading.devices
    assert (card.temperature_c, card.utilization_percent, card.memory_used_mb, card.memory_total_mb) == (
        61,
        37,
        4096,
        12287,
    )
    assert reading.problems == ()


def test_unknown_columns_without_a_header_stay_unknown_and_are_reported() -> None:
    reading = parse_csv(UNKNOWN_COLUMNS_CSV)
    (one,) = reading.devices
    assert (one.name, one.pci_bus_id, one.memory_total_mb) == ("NVIDIA Test One", "0000:3b:00.0", None)
    assert "header" in reading.problems[0].message


def test_a_row_without_values_is_a_device_with_unknown_figures() -> None:
    (one,) = parse_csv("[N/A], [N/A], [N/A]\n").devices
    assert (one.memory_total_mb, one.utilization_percent, one.name) == (None, None, None)


def test_a_lost_card_is_unhealthy() -> None:
    (field,) = parse_csv(LOST_CSV).devices
    (line,) = parse_csv(LOST_LINE).devices
    assert (field.fault, line.fault) == ("GPU is lost", "GPU is lost.  Reboot to recover this GPU")
    assert line.id == line.pci_bus_id == "0000:3b:00.0"


def test_the_message_of_a_lost_card_is_not_used_as_its_uuid() -> None:
    (gone,) = parse_csv("index, uuid, pci.bus_id\n0, [GPU is lost], 00000000:3B:00.0\n").devices
    assert (gone.id, gone.fault) == ("0000:3b:00.0", "GPU is lost")


def test_the_last_row_of_each_card_in_a_loop_counts() -> None:
    one, two = parse_csv(LOOP_CSV).devices
    assert (one.index, one.utilization_percent, one.memory_used_mb) == (0, 91, 8000)
    assert (two.index, two.utilization_percent, two.memory_used_mb) == (1, 5, 20)


def test_the_last_row_of_each_card_in_a_loop_without_a_header_counts() -> None:
    later = HEADERLESS_CSV.replace(" 4096,", " 5000,")
    assert [device.memory_used_mb for device in parse_csv(HEADERLESS_CSV + later).devices] == [5000, 0]


def test_cards_with_the_same_masked_uuid_are_identified_by_bus_id() -> None:
    masked = "GPU-00000000-0000-0000-0000-000000000000"
    header = "uuid, pci.bus_id, utilization.gpu [%]\n"
    rows = f"{masked}, 00000000:01:00.0, 1 %\n{masked}, 00000000:02:00.0, 2 %\n"
    devices = parse_csv(header + rows + rows.replace("1 %", "11 %")).devices
    assert [(device.pci_bus_id, device.utilization_percent) for device in devices] == [
        ("0000:01:00.0", 11),
        ("0000:02:00.0", 2),
    ]


def test_rows_without_an_identity_are_separate_cards() -> None:
    assert len(parse_csv("name, memory.total [MiB]\nNVIDIA X, 10 MiB\nNVIDIA X, 10 MiB\n").devices) == 2
    assert len(parse_csv("uuid, memory.total [MiB]\n[N/A], 10 MiB\n[N/A], 10 MiB\n").devices) == 2


@pytest.mark.parametrize("text", ["", "hello, world\n", "a,b\n1,2\n", "1, 2, 3\n", XML, APPS])
def test_text_without_cards_is_refused(text: str) -> None:
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
    assert two.processes == (Process(pid=88, memory_mb=5, name=None),)


@pytest.mark.parametrize(
    ("text", "card", "process"),
    [
        ("GPU-11111111-2222, 42, 300 MiB, a, b\n", "GPU-11111111-2222", Process(pid=42, memory_mb=300, name="a, b")),
        ("42, python, 300 MiB\n", "nvidia-0", Process(pid=42, memory_mb=300, name="python")),
        ("python, 300 MiB, 42\n", "nvidia-0", Process(pid=42, memory_mb=300, name="python")),
        ("00000000:3B:00.0, 42, [N/A]\n", "0000:3b:00.0", Process(pid=42)),
        ("2024/01/02 03:04:05.678, NVIDIA L40S, 00000000:3B:00.0, 42, nvidia-smi, 1 MiB\n", "0000:3b:00.0",
         Process(pid=42, memory_mb=1, name="nvidia-smi")),
        ("42, [Not Found], [Insufficient Permissions], 300 MiB\n", "nvidia-0", Process(pid=42, memory_mb=300)),
    ],
)  # fmt: skip
def test_processes_without_a_header_are_parsed_if_unambiguous(text: str, card: str, process: Process) -> None:
    reading = parse_apps(text)
    (device,) = reading.devices
    assert (device.id, device.processes) == (card, (process,))
    assert reading.problems == ()


def test_a_number_without_unit_and_header_is_unknown_and_reported() -> None:
    reading = parse_apps("GPU-11111111-0000-0000-0000-000000000001, 42, 300\n")
    assert reading.devices[0].processes == (Process(pid=42),)
    assert "header" in reading.problems[0].message


@pytest.mark.parametrize(
    "row",
    [
        "GPU-11111111-0000-0000-0000-000000000001, [N/A], 300 MiB, python",
        "GPU-11111111-0000-0000-0000-000000000001, , 300 MiB, python",
        "GPU-11111111-0000-0000-0000-000000000001, [Insufficient Permissions], [N/A], [Not Found]",
        "[N/A], [N/A], [N/A], [N/A]",
    ],
)
@pytest.mark.parametrize("header", ["", "gpu_uuid, pid, used_gpu_memory [MiB], process_name\n"])
def test_a_row_without_a_pid_is_left_out_and_reported(row: str, header: str) -> None:
    reading = parse_apps(f"{header}{APPS_WITHOUT_HEADER}{row}\n")
    (card,) = reading.devices
    assert card.processes is not None
    assert [process.pid for process in card.processes] == [4242, 77]
    (problem,) = reading.problems
    assert (problem.kind, "1 of 3 rows" in problem.message) == ("garbled", True)


def test_a_card_whose_only_row_has_no_pid_has_unknown_processes() -> None:
    other = "GPU-22222222-0000-0000-0000-000000000002, [N/A], 5 MiB, python\n"
    one, two = parse_apps(APPS_WITHOUT_HEADER + other).devices
    assert one.processes is not None
    assert two.processes is None


def test_memory_without_a_unit_is_not_taken_for_a_missing_pid() -> None:
    card = "GPU-11111111-0000-0000-0000-000000000001"
    reading = parse_apps(f"{card}, 42, 300\n{card}, [N/A], 512\n")
    assert reading.devices[0].processes == (Process(pid=42),)
    assert [problem.message for problem in reading.problems if "process id" in problem.message]


def test_a_process_that_is_listed_twice_on_a_card_counts_once() -> None:
    card = "GPU-11111111-0000-0000-0000-000000000001"
    reading = parse_apps(f"gpu_uuid, pid, used_gpu_memory [MiB]\n{card}, 42, [N/A]\n{card}, 42, 300 MiB\n")
    assert reading.devices[0].processes == (Process(pid=42, memory_mb=300),)


def test_an_empty_process_list_is_not_an_error() -> None:
    assert parse_apps("pid, process_name, used_gpu_memory [MiB]\n").devices == ()


def test_processes_without_a_column_for_their_card_belong_to_the_first_card() -> None:
    (card,) = parse_apps(APPS_WITHOUT_CARD).devices
    assert (card.id, card.processes) == ("nvidia-0", (Process(pid=4242, memory_mb=3800),))


@pytest.mark.parametrize(
    "text",
    ["", "hello", CSV, "1, 2\n", HEADERLESS_CSV, "python, 300 MiB\n", "1, GPU-11111111, 5 %\n", CSV.partition("\n")[2]],
)
def test_text_without_processes_is_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse_apps(text)
