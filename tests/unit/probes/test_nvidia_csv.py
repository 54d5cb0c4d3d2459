import pytest

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Process
from gpuyard.probes.nvidia.nvidia_smi import parse_apps, parse_csv
from tests.unit.probes.samples_nvidia import APPS, APPS_WITHOUT_CARD, CSV, LOST_CSV, LOST_LINE, NO_UNITS_CSV, XML

TWO_PROCESSES = "".join(APPS.splitlines(keepends=True)[:3])


def test_values_are_parsed_by_the_header_with_and_without_units() -> None:
    one, two = parse_csv(CSV).devices
    assert (one.index, one.name, one.memory_total_mb, one.memory_used_mb) == (0, "NVIDIA Test One", 24576, 4096)
    assert (one.utilization_percent, one.power_draw_w, one.power_limit_w, one.temperature_c) == (37, 201.5, 350, 61)
    assert (two.memory_used_mb, two.utilization_percent, two.power_draw_w, two.power_limit_w) == (0, None, None, None)
    (one,) = parse_csv(NO_UNITS_CSV).devices
    assert (one.memory_total_mb, one.utilization_percent, one.power_draw_w, one.power_limit_w) == (
        24576, 37, 201.5, 350,
    )  # fmt: skip
    assert (one.id, one.temperature_c, one.processes) == ("nvidia-0", None, None)
    columns = "index,uuid,name,temperature.gpu,utilization.gpu,memory.used,memory.total\n"
    reading = parse_csv(f"{columns}0, GPU-1, NVIDIA Test One, 61, 37, 4096, 12287\n")
    (card,) = reading.devices
    assert (card.temperature_c, card.utilization_percent, card.memory_used_mb, card.memory_total_mb) == (
        61, 37, 4096, 12287,
    )  # fmt: skip
    assert reading.problems == ()


def test_a_lost_card_is_unhealthy_and_its_message_is_not_its_uuid() -> None:
    (field,) = parse_csv(LOST_CSV).devices
    (line,) = parse_csv(LOST_LINE).devices
    assert (field.fault, line.fault) == ("GPU is lost", "GPU is lost.  Reboot to recover this GPU")
    assert line.id == line.pci_bus_id == "0000:3b:00.0"
    (gone,) = parse_csv("index, uuid, pci.bus_id\n0, [GPU is lost], 00000000:3B:00.0\n").devices
    assert (gone.id, gone.fault) == ("0000:3b:00.0", "GPU is lost")


def test_cards_are_told_apart_by_bus_id_or_row() -> None:
    masked = "GPU-00000000-0000-0000-0000-000000000000"
    header = "uuid, pci.bus_id, utilization.gpu [%]\n"
    rows = f"{masked}, 00000000:01:00.0, 1 %\n{masked}, 00000000:02:00.0, 2 %\n"
    devices = parse_csv(header + rows).devices
    assert [(device.pci_bus_id, device.utilization_percent) for device in devices] == [
        ("0000:01:00.0", 1),
        ("0000:02:00.0", 2),
    ]
    assert len(parse_csv("name, memory.total [MiB]\nNVIDIA X, 10 MiB\nNVIDIA X, 10 MiB\n").devices) == 2
    assert len(parse_csv("uuid, memory.total [MiB]\n[N/A], 10 MiB\n[N/A], 10 MiB\n").devices) == 2


@pytest.mark.parametrize(
    "text",
    ["", "hello, world\n", "a,b\n1,2\n", "1, 2, 3\n", "0, NVIDIA Test One, 61, 4096, 24576, 37, 201.50\n", XML, APPS],
)
def test_text_without_cards_is_refused(text: str) -> None:
    if text == APPS:
        assert parse_csv(text).devices[0].memory_total_mb is None
        return
    with pytest.raises(ProbeGarbled):
        parse_csv(text)


def test_processes_are_listed_under_their_cards_or_the_first() -> None:
    one, two = parse_apps(APPS).devices
    assert one.processes == (
        Process(pid=4242, memory_mb=3800, name="python, with a comma, train.py"),
        Process(pid=77, memory_mb=None, name="Xorg"),
    )
    assert two.processes == (Process(pid=88, memory_mb=5, name=None),)
    (card,) = parse_apps(APPS_WITHOUT_CARD).devices
    assert (card.id, card.processes) == ("nvidia-0", (Process(pid=4242, memory_mb=3800),))
    assert parse_apps("pid, process_name, used_gpu_memory [MiB]\n").devices == ()
    twice = "gpu_uuid, pid, used_gpu_memory [MiB]\nGPU-1, 42, [N/A]\nGPU-1, 42, 300 MiB\n"
    reading = parse_apps(twice)
    assert reading.devices[0].processes == (Process(pid=42, memory_mb=300),)


@pytest.mark.parametrize(
    "row",
    [
        "GPU-11111111-0000-0000-0000-000000000001, [N/A], 300 MiB, python",
        "GPU-11111111-0000-0000-0000-000000000001, , 300 MiB, python",
        "GPU-11111111-0000-0000-0000-000000000001, [Insufficient Permissions], [N/A], [Not Found]",
        "[N/A], [N/A], [N/A], [N/A]",
    ],
)
def test_a_row_without_a_pid_is_left_out_and_reported(row: str) -> None:
    reading = parse_apps(f"{TWO_PROCESSES}{row}\n")
    (card,) = reading.devices
    assert card.processes is not None
    assert [process.pid for process in card.processes] == [4242, 77]
    (problem,) = reading.problems
    assert (problem.kind, "1 of 3 rows" in problem.message) == ("garbled", True)


def test_a_card_whose_only_row_has_no_pid_has_unknown_processes() -> None:
    other = "GPU-22222222-0000-0000-0000-000000000002, [N/A], 5 MiB, python\n"
    one, two = parse_apps(TWO_PROCESSES + other).devices
    assert one.processes is not None
    assert two.processes is None


@pytest.mark.parametrize(
    "text", ["", "hello", CSV, "1, 2\n", "python, 300 MiB\n", "1, GPU-11111111, 5 %\n", CSV.partition("\n")[2]]
)
def test_text_without_processes_is_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse_apps(text)
