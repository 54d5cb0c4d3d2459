import pytest

from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.model.machine_snapshot import Process, Vendor
from gpuyard.probes.nvidia.nvidia_smi import parse_xml
from tests.unit.probes.samples_nvidia import LOST_FIELD_XML, LOST_LINE, MIG_XML, XML


def test_each_card_has_its_own_figures() -> None:
    one, two = parse_xml(XML).devices
    assert (one.id, one.index, one.name, one.vendor) == (
        "GPU-11111111-0000-0000-0000-000000000001", 0, "NVIDIA Test One", Vendor.NVIDIA,
    )  # fmt: skip
    assert (one.memory_total_mb, one.memory_used_mb, one.memory_free_mb) == (24576, 4096, 20180)
    assert (one.utilization_percent, one.temperature_c, one.pci_bus_id) == (37, 61, "0000:3b:00.0")
    assert (two.index, two.memory_used_mb, two.utilization_percent, two.processes) == (1, 0, None, ())
    assert (one.power_draw_w, one.power_limit_w) == (201.5, 350)
    assert (two.power_draw_w, two.power_limit_w) == (30, 200)
    assert one.processes == (
        Process(pid=4242, memory_mb=3800, name="python train.py"),
        Process(pid=77, memory_mb=None, name="GPU is lost"),
    )
    assert all(device.healthy for device in parse_xml(XML).devices)
    assert parse_xml(XML).problems == ()


def test_a_process_listed_as_compute_and_graphics_counts_once_with_the_larger_figure() -> None:
    entry = (
        "<process_info><pid>4242</pid><type>G</type><process_name>python train.py</process_name>"
        "<used_memory>{}</used_memory></process_info>\n    </processes>"
    )
    for graphics, whole in (("3800 MiB", 3800), ("N/A", 3800), ("3900 MiB", 3900)):
        one, _ = parse_xml(XML.replace("</processes>", entry.format(graphics), 1)).devices
        assert one.processes is not None
        assert [(process.pid, process.memory_mb) for process in one.processes] == [(4242, whole), (77, None)]


def test_mig_instances_are_devices_with_ids_that_cuda_accepts() -> None:
    card, first, second = parse_xml(MIG_XML).devices
    assert first.id == "MIG-GPU-33333333-0000-0000-0000-000000000003/3/0"
    assert second.id == "MIG-44444444-0000-0000-0000-000000000004"
    assert first.parent == second.parent == card.id
    assert (first.memory_total_mb, first.memory_used_mb, first.utilization_percent) == (9856, 1200, None)
    assert first.processes == (Process(pid=900),)
    assert second.processes == ()


def test_a_lost_card_is_unhealthy_and_the_others_are_not() -> None:
    gone, here = parse_xml(LOST_FIELD_XML).devices
    assert (gone.fault, gone.id) == ("GPU is lost", "0000:01:00.0")
    assert here.healthy
    line = "Unable to determine the device handle for GPU 0000:AA:00.0: Unknown Error\n"
    assert [device.healthy for device in parse_xml(line + XML).devices] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "bus_id"),
    [
        (LOST_LINE, "0000:3b:00.0"),
        ("Unable to determine the device handle for GPU 0000:09:00.0: Unknown Error", "0000:09:00.0"),
        ("Unable to determine the device handle for GPU0001:0a:00.0: GPU has fallen off the bus.", "0001:0a:00.0"),
    ],
)
def test_a_lost_card_alone_on_a_line_is_an_unhealthy_device(line: str, bus_id: str) -> None:
    (device,) = parse_xml(line).devices
    assert (device.id, device.pci_bus_id) == (bus_id, bus_id)
    assert not device.healthy


@pytest.mark.parametrize(
    "text",
    [XML[: XML.index("NVIDIA Test Two")], XML.replace("NVIDIA Test Two", "NVIDIA <Two"), XML.replace(" Two<", " &x;<")],
    ids=["cut", "a stray bracket", "a stray entity"],
)
def test_a_broken_document_gives_its_complete_cards_and_a_problem(text: str) -> None:
    reading = parse_xml(text)
    assert [device.name for device in reading.devices] == ["NVIDIA Test One"]
    (problem,) = reading.problems
    assert (problem.source, problem.kind) == ("nvidia-smi", "garbled")
    assert "breaks off after 1 whole" in problem.message


def test_what_is_no_document_is_refused_with_the_message_of_the_tool() -> None:
    with pytest.raises(ProbeGarbled):
        parse_xml(XML.replace("NVIDIA Test One", "NVIDIA <One"))
    reading = parse_xml(f"{LOST_LINE}<nvidia_smi_log><gpu>")
    assert [device.healthy for device in reading.devices] == [False]
    assert [problem.kind for problem in reading.problems] == ["garbled"]
    with pytest.raises(ProbeCrashed, match="version mismatch"):
        parse_xml("Failed to initialize NVML: Driver/library version mismatch\n")


def test_a_machine_without_cards_is_not_an_error() -> None:
    assert parse_xml("No devices were found\n").devices == ()
    assert parse_xml("<nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log>").devices == ()


@pytest.mark.parametrize("text", ["", "hello", "<html></html>", "{}", "<nvidia_smi_log><gpu>"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled):
        parse_xml(text)
