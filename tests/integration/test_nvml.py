"""The NVML probe, unchanged, over a fake libnvidia-ml.so.1: real ctypes, real dlopen, one process per test."""

import ctypes.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.nvml import (
    FakeDevice,
    FakeInstance,
    FakeMemory,
    FakeNvml,
    FakeProcess,
    FakeState,
    Result,
    build_fake_nvml,
)
from tests.fakes.nvml_reader import Reader, by_id, healthy_ids, processes_of, run_program

pytestmark = pytest.mark.needs("cc")
unmeasured = pytest.mark.usefixtures("unmeasured")

MIB = 1048576
GIB = 1024 * MIB

RTX = FakeDevice(
    uuid="GPU-aaaaaaaa-0000-0000-0000-000000000001",
    name="NVIDIA GeForce RTX 4090",
    pci="00000000:0A:00.0",
    memory=FakeMemory(total=24564 * MIB, reserved=454 * MIB, used=3000 * MIB),
    utilization=37,
    power_mw=120500,
    power_limit_mw=450000,
    energy_mj=7_200_000_500,
    temperature=61,
)
L40 = FakeDevice(
    uuid="GPU-bbbbbbbb-0000-0000-0000-000000000002",
    name="NVIDIA L40S",
    pci="00000000:41:00.0",
    memory=FakeMemory(total=46068 * MIB, reserved=609 * MIB),
    utilization=0,
    power_mw=34120,
    power_limit_mw=350000,
    temperature=29,
)
A100 = FakeDevice(
    uuid="GPU-cccccccc-0000-0000-0000-000000000003",
    name="NVIDIA A100-SXM4-40GB",
    pci="00000000:C1:00.0",
    memory=FakeMemory(total=40 * GIB, reserved=624 * MIB, used=1 * GIB),
    power_mw=51000,
    power_limit_mw=400000,
    temperature=33,
    places=7,
)
ONE = FakeInstance(
    uuid="MIG-11111111-0000-0000-0000-000000000001",
    place=0,
    gpu_instance=7,
    name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    memory=FakeMemory(total=4864 * MIB, used=512 * MIB),
    processes=(FakeProcess(pid=700, memory=500 * MIB),),
)
THREE = FakeInstance(
    uuid="MIG-33333333-0000-0000-0000-000000000003",
    place=2,
    gpu_instance=2,
    name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    memory=FakeMemory(total=19968 * MIB, used=25 * MIB),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("old-nvml"), old_driver=True)


@pytest.fixture
def reader(library: Path, tmp_path: Path) -> Reader:
    return Reader(FakeNvml(library=library, state_file=tmp_path / "nvml"), tmp_path / "root")


@pytest.fixture
def old_reader(old_library: Path, tmp_path: Path) -> Reader:
    return Reader(FakeNvml(library=old_library, state_file=tmp_path / "nvml"), tmp_path / "root")


def test_every_figure_is_read_and_used_memory_leaves_out_the_reserved_part(reader: Reader) -> None:
    (found,) = reader.devices(RTX)
    assert found.pop("health") is not None
    assert [found] == [
        {
            "id": RTX.uuid,
            "vendor": "nvidia",
            "index": 0,
            "name": "NVIDIA GeForce RTX 4090",
            "parent": None,
            "pci_bus_id": "0000:0a:00.0",
            "memory_total_mb": 24564.0,
            "memory_used_mb": 3000.0,
            "memory_used_at_least_mb": None,
            "memory_free_mb": 21110.0,
            "utilization_percent": 37.0,
            "power_draw_w": 120.5,
            "power_limit_w": 450.0,
            "energy_j": 7_200_000.5,
            "temperature_c": 61.0,
            "processes": [],
            "fault": None,
            "is_integrated": False,
        }
    ]


def test_two_cards_are_listed_in_their_order_with_their_own_figures(reader: Reader) -> None:
    first, second = reader.devices(L40, RTX)
    assert (first["id"], first["index"], first["power_draw_w"]) == (L40.uuid, 0, 34.12)
    assert (second["id"], second["index"], second["power_draw_w"]) == (RTX.uuid, 1, 120.5)


def test_a_card_that_this_user_may_not_use_is_left_out_and_counted(reader: Reader) -> None:
    denied = replace(RTX, results={"nvmlDeviceGetHandleBy*": Result.NO_PERMISSION})
    state = FakeState(devices=(denied, L40, replace(denied, uuid="GPU-other"), A100))
    first, second = reader.read_each(state, state)
    assert [(device["id"], device["index"]) for device in first["devices"]] == [(L40.uuid, 1), (A100.uuid, 3)]
    (problem,) = first["problems"]
    assert (problem["source"], problem["kind"], problem["vendor"]) == ("nvml", "denied", "nvidia")
    assert "2 of 4 GPUs" in problem["message"]
    assert "/dev/nvidia" in problem["hint"]
    assert "cgroup" in problem["hint"]
    assert second == first


def test_a_card_that_denies_even_its_name_counts_as_denied_to_this_user(reader: Reader) -> None:
    outcome = reader.read_each(FakeState(devices=(replace(RTX, results={"*": Result.NO_PERMISSION}), L40)))[0]
    assert healthy_ids(outcome) == {L40.uuid}
    assert [problem["kind"] for problem in outcome["problems"]] == ["denied"]


def test_a_denied_card_does_not_take_the_place_of_a_lost_one(reader: Reader) -> None:
    denied = replace(RTX, results={"nvmlDeviceGetHandleBy*": Result.NO_PERMISSION})
    lost = replace(L40, results={"*": Result.GPU_IS_LOST})
    states = (FakeState(devices=(denied, L40)), FakeState(devices=(denied, lost)))
    _, after = reader.read_each(*states, set_up_each_time=True)
    assert [(device["id"], device["index"]) for device in after["devices"]] == [(L40.uuid, 1)]
    assert by_id(after)[L40.uuid]["fault"]
    assert [problem["kind"] for problem in after["problems"]] == ["denied"]


def test_a_card_without_a_uuid_is_healthy_and_is_identified_by_bus_id_or_number(reader: Reader) -> None:
    without = {"nvmlDeviceGetUUID": Result.NOT_SUPPORTED}
    first, second = reader.devices(replace(RTX, results=without), replace(L40, results=without, pci=None))
    assert (first["id"], first["fault"], first["memory_used_mb"]) == ("0000:0a:00.0", None, 3000.0)
    assert (second["id"], second["fault"], second["pci_bus_id"]) == ("nvidia-1", None, None)


@pytest.mark.parametrize("code", [Result.NOT_SUPPORTED, Result.FUNCTION_NOT_FOUND])
def test_a_card_that_supports_nothing_is_healthy_with_unknown_figures(reader: Reader, code: int) -> None:
    for outcome in reader.read_each(*[FakeState(devices=(replace(RTX, results={"*": code}), L40))] * 2):
        jetson, other = outcome["devices"]
        assert (jetson["id"], jetson["fault"]) == ("nvidia-0", None)
        assert (jetson["memory_total_mb"], jetson["power_draw_w"], jetson["processes"]) == (None, None, None)
        assert (other["id"], other["power_draw_w"]) == (L40.uuid, 34.12)


def test_a_card_whose_figures_all_fail_is_unhealthy(reader: Reader) -> None:
    good, gone = FakeState(devices=(RTX, L40)), replace(RTX, results={"*": Result.UNKNOWN_ERROR})
    _, after = reader.read_each(good, FakeState(devices=(gone, L40)))
    assert "answers nothing" in by_id(after)[RTX.uuid]["fault"]
    assert by_id(after)[L40.uuid]["fault"] is None


def test_a_machine_without_cards_has_no_devices(reader: Reader) -> None:
    assert reader.devices() == []


def test_processes_of_all_three_kinds_are_merged_by_pid(reader: Reader) -> None:
    processes = (
        FakeProcess(pid=42, memory=300 * MIB),
        FakeProcess(pid=7, memory=100 * MIB, kind="mps"),
        FakeProcess(pid=42, memory=300 * MIB, kind="graphics"),
        FakeProcess(pid=9, memory=0, kind="graphics"),
    )
    device = reader.devices(replace(RTX, processes=processes))[0]
    assert processes_of(device) == [(7, 100.0), (9, 0.0), (42, 300.0)]


def test_process_memory_that_the_driver_hides_is_unknown_and_not_zero(reader: Reader) -> None:
    device = reader.devices(replace(RTX, processes=(FakeProcess(pid=42, memory=None),)))[0]
    assert processes_of(device) == [(42, None)]


def test_process_memory_hidden_in_one_list_is_taken_from_the_other(reader: Reader) -> None:
    processes = (FakeProcess(pid=42, memory=64 * MIB), FakeProcess(pid=42, memory=None, kind="graphics"))
    device = reader.devices(replace(RTX, processes=processes))[0]
    assert processes_of(device) == [(42, 64.0)]


def test_hundreds_of_processes_are_all_listed(reader: Reader) -> None:
    processes = tuple(FakeProcess(pid=pid, memory=pid * MIB) for pid in range(1, 501))
    device = reader.devices(replace(RTX, processes=processes))[0]
    assert processes_of(device) == [(n, float(n)) for n in range(1, 501)]


@pytest.mark.parametrize("code", [Result.NOT_SUPPORTED, Result.NO_PERMISSION])
def test_processes_that_cannot_be_listed_are_unknown_and_not_empty(reader: Reader, code: int) -> None:
    refusals = {f"nvmlDeviceGet{kind}RunningProcesses*": code for kind in ("Compute", "Graphics", "MPSCompute")}
    device = reader.devices(replace(RTX, results=refusals))[0]
    assert device["processes"] is None
    assert (device["memory_used_mb"], device["fault"]) == (3000.0, None)


def test_a_list_of_processes_that_is_not_supported_does_not_hide_the_others(reader: Reader) -> None:
    refusals = {f"nvmlDeviceGet{kind}RunningProcesses*": Result.NOT_SUPPORTED for kind in ("Graphics", "MPSCompute")}
    device = reader.devices(replace(RTX, results=refusals, processes=(FakeProcess(pid=42, memory=MIB),)))[0]
    assert [found["pid"] for found in device["processes"]] == [42]


@unmeasured
@pytest.mark.parametrize("code", [Result.NOT_SUPPORTED, Result.NO_PERMISSION, Result.UNKNOWN_ERROR])
@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetUtilizationRates", {"utilization_percent"}),
        ("nvmlDeviceGetPowerUsage", {"power_draw_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_w"}),
        ("nvmlDeviceGetTemperature*", {"temperature_c"}),
        ("nvmlDeviceGetMemoryInfo*", {"memory_total_mb", "memory_used_mb", "memory_free_mb"}),
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetPciInfo_v3", {"pci_bus_id"}),
    ],
)
def test_a_refused_figure_is_unknown_and_the_others_are_read(
    reader: Reader, function: str, fields: set[str], code: int
) -> None:
    plain, refused = reader.devices(replace(RTX, uuid="GPU-plain"), replace(RTX, results={function: code}))
    assert refused["fault"] is None
    assert {field for field in refused if refused[field] != plain[field]} == {"id", "index"} | fields
    assert all(refused[field] is None for field in fields)


def test_a_split_card_is_listed_with_its_instances_as_its_parts(reader: Reader) -> None:
    card, one, three = reader.devices(replace(A100, is_split=True, instances=(ONE, THREE)))
    assert (card["id"], card["parent"], card["utilization_percent"]) == (A100.uuid, None, None)
    assert (one["id"], one["parent"], one["name"]) == (ONE.uuid, A100.uuid, ONE.name)
    assert (one["memory_total_mb"], one["memory_used_mb"], one["memory_free_mb"]) == (4864.0, 512.0, 4352.0)
    assert (one["pci_bus_id"], one["fault"]) == ("0000:c1:00.0", None)
    assert processes_of(one) == [(700, 500.0)]
    assert (three["id"], three["parent"], three["processes"]) == (THREE.uuid, A100.uuid, [])
    assert (three["power_draw_w"], three["temperature_c"], three["utilization_percent"]) == (None, None, None)


def test_the_memory_of_cards_and_instances_can_be_read_alone(reader: Reader) -> None:
    split = replace(A100, is_split=True, instances=(ONE, THREE))
    grown = replace(RTX, memory=FakeMemory(total=24564 * MIB, reserved=454 * MIB, used=9000 * MIB), power_mw=1)
    grown_part = replace(ONE, memory=FakeMemory(total=4864 * MIB, used=900 * MIB))
    lost = replace(L40, results={"*": Result.GPU_IS_LOST})
    first, then = reader.read_each(
        FakeState(devices=(RTX, L40, split)),
        FakeState(devices=(grown, lost, replace(split, instances=(grown_part, THREE)))),
        memory_from=1,
    )
    before, after = by_id(first), by_id(then)
    assert after[RTX.uuid]["memory_used_mb"] == before[RTX.uuid]["memory_used_mb"] + 6000
    assert after[ONE.uuid]["memory_used_mb"] == 900.0
    assert processes_of(after[ONE.uuid]) == [(700, 500.0)]
    assert L40.uuid not in after, "the next full reading says what is wrong with it"
    assert after[RTX.uuid]["power_draw_w"] is None


def test_a_card_that_could_be_split_but_is_not_is_one_device(reader: Reader) -> None:
    card = replace(A100, utilization=12)
    assert [(device["id"], device["utilization_percent"]) for device in reader.devices(card)] == [(A100.uuid, 12.0)]


def test_instances_come_and_go_while_their_card_is_in_use(reader: Reader) -> None:
    split = replace(A100, is_split=True)
    outcomes = reader.read_each(
        *(FakeState(devices=(replace(split, instances=parts),)) for parts in ((ONE,), (ONE, THREE), (THREE,), ()))
    )
    assert [set(by_id(outcome)) for outcome in outcomes] == [
        {A100.uuid, ONE.uuid},
        {A100.uuid, ONE.uuid, THREE.uuid},
        {A100.uuid, THREE.uuid},
        {A100.uuid},
    ]


def test_a_split_card_that_is_lost_takes_its_instances_with_it(reader: Reader) -> None:
    split = replace(A100, is_split=True, instances=(ONE, THREE))
    lost = replace(split, results={"*": Result.GPU_IS_LOST})
    _, after = reader.read_each(FakeState(devices=(split, RTX)), FakeState(devices=(lost, RTX)))
    assert healthy_ids(after) == {RTX.uuid}
    assert by_id(after)[A100.uuid]["fault"]


@pytest.mark.parametrize("code", [Result.GPU_IS_LOST, Result.UNKNOWN_ERROR])
def test_a_card_that_has_fallen_off_the_bus_is_unhealthy_and_the_other_is_not(reader: Reader, code: int) -> None:
    lost = replace(RTX, results={"nvmlDeviceGetHandleBy*": code, "*": code})
    first, second = reader.devices(lost, L40)
    assert first["index"] == 0
    assert first["fault"]
    assert first["memory_total_mb"] is None
    assert first["processes"] is None
    assert (second["id"], second["index"], second["fault"], second["memory_used_mb"]) == (L40.uuid, 1, None, 0.0)


def test_a_card_lost_before_the_first_read_is_named_by_what_the_kernel_remembers(reader: Reader) -> None:
    for bus_id, uuid, model in (("0000:0a:00.0", RTX.uuid, RTX.name), ("0000:41:00.0", L40.uuid, L40.name)):
        folder = reader.root / "proc/driver/nvidia/gpus" / bus_id
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 95\nGPU UUID: \t {uuid}\n")
    lost = replace(RTX, results={"nvmlDeviceGetHandleBy*": Result.GPU_IS_LOST})
    first, second = reader.devices(lost, L40)
    assert (first["id"], first["name"], first["pci_bus_id"]) == (RTX.uuid, RTX.name, "0000:0a:00.0")
    assert first["fault"]
    assert (second["id"], second["fault"]) == (L40.uuid, None)


@unmeasured
@pytest.mark.parametrize("code", [Result.GPU_IS_LOST, Result.RESET_REQUIRED])
@pytest.mark.parametrize("set_up_each_time", [False, True])
def test_a_card_lost_after_a_good_read_is_unhealthy_under_its_own_id(
    reader: Reader, code: int, set_up_each_time: bool
) -> None:
    lost = replace(RTX, results={"nvmlDeviceGetHandleBy*": code, "*": code})
    good, gone = FakeState(devices=(RTX, L40)), FakeState(devices=(lost, L40))
    before, *after = reader.read_each(good, gone, gone, set_up_each_time=set_up_each_time)
    assert by_id(before)[RTX.uuid]["fault"] is None
    for outcome in after:
        ill, well = by_id(outcome)[RTX.uuid], by_id(outcome)[L40.uuid]
        assert ill["fault"]
        assert (ill["index"], ill["name"], ill["pci_bus_id"]) == (0, RTX.name, "0000:0a:00.0")
        assert (ill["memory_used_mb"], ill["processes"]) == (None, None)
        assert (well["fault"], well["memory_total_mb"]) == (None, 46068.0)


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo*", "nvmlDeviceGetTemperature*", "nvmlDeviceGetCompute*"])
def test_a_card_lost_in_the_middle_of_a_read_is_unhealthy(reader: Reader, function: str) -> None:
    lost = replace(RTX, results={function: Result.GPU_IS_LOST})
    _, after = reader.read_each(FakeState(devices=(RTX, L40)), FakeState(devices=(lost, L40)))
    assert by_id(after)[RTX.uuid]["fault"]
    assert by_id(after)[L40.uuid]["fault"] is None


@pytest.mark.parametrize("set_up_each_time", [False, True])
def test_a_card_that_is_no_longer_counted_is_never_healthy_and_the_other_keeps_its_id(
    reader: Reader, set_up_each_time: bool
) -> None:
    both, one = FakeState(devices=(RTX, L40)), FakeState(devices=(L40,))
    _, *after = reader.read_each(both, one, one, set_up_each_time=set_up_each_time)
    for outcome in after:
        assert healthy_ids(outcome) == {L40.uuid}
        assert by_id(outcome)[L40.uuid]["memory_total_mb"] == 46068.0


def test_a_lost_card_that_comes_back_is_healthy_after_reinitialisation(reader: Reader) -> None:
    lost = replace(RTX, results={"nvmlDeviceGetHandleBy*": Result.GPU_IS_LOST, "*": Result.GPU_IS_LOST})
    good, gone = FakeState(devices=(RTX, L40)), FakeState(devices=(lost, L40))
    *_, last = reader.read_each(good, gone, gone, good, set_up_each_time=True)
    assert by_id(last)[RTX.uuid]["fault"] is None
    assert by_id(last)[RTX.uuid]["memory_used_mb"] == 3000.0


def test_a_lost_card_is_not_taken_for_the_one_that_moved_to_its_number(reader: Reader) -> None:
    lost = replace(A100, results={"nvmlDeviceGetHandleBy*": Result.GPU_IS_LOST, "*": Result.GPU_IS_LOST})
    three, two = FakeState(devices=(RTX, L40, A100)), FakeState(devices=(L40, lost))
    *_, last = reader.read_each(three, two, two, set_up_each_time=True)
    assert healthy_ids(last) == {L40.uuid}


@pytest.mark.parametrize(
    ("code", "advice"),
    [(Result.DRIVER_NOT_LOADED, "modprobe"), (Result.VERSION_MISMATCH, "reboot"), (Result.UNKNOWN_ERROR, "dmesg")],
)
def test_a_driver_that_does_not_start_is_an_error_that_says_what_to_try(reader: Reader, code: int, advice: str) -> None:
    outcome = reader.read_each(FakeState(devices=(RTX,), init=code))[0]
    assert outcome["error"] == "ProbeCrashed"
    assert outcome["says"].startswith("nvml: ")
    assert advice in outcome["hint"]


def test_a_driver_that_this_user_may_not_use_is_denied(reader: Reader) -> None:
    outcome = reader.read_each(FakeState(devices=(RTX,), init=Result.NO_PERMISSION))[0]
    assert outcome["error"] == "ProbeDenied"
    assert "/dev/nvidia" in outcome["hint"]


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="NVIDIA's own library is installed")
def test_a_machine_without_the_library_lacks_the_probe(tmp_path: Path) -> None:
    outcome = run_program({"FAKE_NVML_STATE": str(tmp_path / "nvml")}, tmp_path, (FakeState(),))[0]
    assert outcome["error"] == "ProbeMissing"
    assert "libnvidia-ml.so.1" in outcome["says"]


def test_a_library_that_cannot_be_loaded_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML_STATE": str(tmp_path / "nvml")}
    assert run_program(variables, tmp_path, (FakeState(),))[0]["error"] == "ProbeMissing"


def test_an_old_driver_can_be_read(old_reader: Reader) -> None:
    processes = (FakeProcess(pid=42, memory=300 * MIB), FakeProcess(pid=7, memory=None, kind="graphics"))
    device = old_reader.devices(replace(RTX, processes=processes))[0]
    assert processes_of(device) == [(7, None), (42, 300.0)]
    # Before driver 510 the total left out the reserved part, as `nvidia-smi` did.
    assert (device["memory_total_mb"], device["memory_used_mb"], device["memory_free_mb"]) == (24110.0, 3000.0, 21110.0)
    assert (device["temperature_c"], device["utilization_percent"], device["fault"]) == (61.0, 37.0, None)


def test_an_old_driver_s_split_card_can_be_read(old_reader: Reader) -> None:
    devices = old_reader.devices(replace(A100, is_split=True, instances=(ONE,)))
    assert [(device["id"], device["parent"]) for device in devices] == [(A100.uuid, None), (ONE.uuid, A100.uuid)]
    assert [found["pid"] for found in devices[1]["processes"]] == [700]


def test_newer_functions_that_the_driver_does_not_know_are_replaced_by_older_ones(reader: Reader) -> None:
    newer = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetComputeRunningProcesses_v3")
    unknown = dict.fromkeys(newer, Result.FUNCTION_NOT_FOUND)
    device = reader.devices(replace(RTX, results=unknown, processes=(FakeProcess(pid=42, memory=MIB),)))[0]
    assert (device["memory_total_mb"], device["temperature_c"]) == (24564.0, 61.0)
    assert [found["pid"] for found in device["processes"]] == [42]


@pytest.mark.parametrize("code", [Result.DRIVER_NOT_LOADED, Result.VERSION_MISMATCH, Result.NO_PERMISSION])
def test_a_driver_that_recovers_is_read_at_the_next_read(reader: Reader, code: int) -> None:
    broken, good = FakeState(init=code), FakeState(devices=(RTX,))
    first, second, third = reader.read_each(broken, broken, good)
    assert first["error"] == second["error"]
    assert by_id(third)[RTX.uuid]["memory_used_mb"] == 3000.0


def test_a_driver_that_refuses_to_count_is_an_error_and_is_asked_again(reader: Reader) -> None:
    refusing = FakeState(devices=(RTX,), results={"nvmlDeviceGetCount_v2": Result.UNKNOWN_ERROR})
    first, second = reader.read_each(refusing, FakeState(devices=(RTX,)))
    assert first["error"] == "ProbeCrashed"
    assert set(by_id(second)) == {RTX.uuid}


def test_a_library_closed_behind_the_probe_s_back_is_opened_again(reader: Reader) -> None:
    good = FakeState(devices=(RTX,))
    first, _, third = reader.read_each(good, good, good, close_before=1)
    before, after = by_id(first)[RTX.uuid], by_id(third)[RTX.uuid]
    assert after.pop("energy_j") > before.pop("energy_j")
    assert after == before
