"""Fitting a batch to the machine: its runs get devices if the machine has any."""

from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import FixedMemory, WholeDevice
from gpuyard.model.machine_snapshot import Device, Host, Problem, Snapshot, Vendor
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.queue.edit_jobs import fit_to_machine
from tests.unit.policy.test_placement import GB, card

BLIND = card(0, used=None, memory_total_mb=None)
SILENT = Problem(source="nvidia-smi", kind="timeout", message="no answer within 1.7 s", vendor=Vendor.NVIDIA)


def fitted(
    *devices: Device,
    problems: tuple[Problem, ...] = (),
    environment: dict[str, str] | None = None,
    plugged: tuple[Vendor, ...] = (),
    **options: Any,
) -> JobSpec:
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    request = SubmissionRequest(cwd="/", environment=environment or {}, command=("true",), options=typed)
    snapshot = Snapshot(taken_at=1.0, host=Host(), devices=devices, problems=problems)
    return fit_to_machine(parse_submission(request), snapshot, (), None, plugged).spec


def test_a_batch_without_device_options_runs_with_a_device_if_the_machine_has_one() -> None:
    spec = fitted(concurrency="2", max_gpu="80", vram="2G")
    assert spec.need.devices == 0
    assert not spec.learns_memory
    assert spec.pace is not None
    assert spec.pace.max_gpu_percent == 80.0
    assert fitted(card(0, fault="it fell off the bus"), concurrency="2").need.devices == 0
    spec = fitted(card(0), concurrency="2")
    assert spec.need.devices == 1
    assert spec.learns_memory


@pytest.mark.parametrize("options", [{"gpus": "1"}, {"device": "0"}], ids=["gpus", "device"])
def test_a_batch_that_asks_for_devices_is_refused_on_a_machine_without(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        fitted(concurrency="2", **options)


def test_what_no_device_could_do_is_refused() -> None:
    with pytest.raises(UserError, match="there is no usable GPU"):
        fitted()
    with pytest.raises(UserError):
        fitted(card(0), concurrency="2", vram="40G")


@pytest.mark.parametrize(
    "options", [{}, {"vram": "2G"}, {"gpus": "1", "concurrency": "2"}], ids=["alone", "vram", "batch"]
)
def test_a_machine_whose_devices_cannot_be_read_now_refuses_for_now(options: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault, match="no GPU can be used now; GPU-0: too many open files"):
        fitted(Device(id="GPU-0", vendor=Vendor.NVIDIA, index=0, fault="too many open files"), **options)


def test_runs_do_not_share_devices_whose_memory_cannot_be_read() -> None:
    spec = fitted(BLIND, concurrency="2", vram="2G")
    assert spec.need.memory == WholeDevice()
    seen = fitted(BLIND, card(1), concurrency="2", vram="2G")
    assert seen.need.memory == FixedMemory(2 * GB)


def test_a_batch_without_devices_watches_those_that_it_names_or_waits_for_a_plugged_one() -> None:
    assert fitted(card(0), card(1), concurrency="2", gpus="0", max_gpu="80", device="1").need.only == ("G1",)
    assert fitted(card(0), concurrency="2", gpus="0", max_gpu_mem_mb="8000").need.only is None
    with pytest.raises(UserError, match="--gpus 0 asks for no GPU"):
        fitted(card(0), concurrency="2", gpus="0", device="0")
    assert fitted(problems=(SILENT,), concurrency="2", max_gpu="80").need.devices == 0
    assert fitted(problems=(SILENT,), concurrency="2", plugged=(Vendor.AMD,)).need.devices == 0
    assert fitted(problems=(SILENT,), concurrency="2", plugged=(Vendor.NVIDIA,)).need.devices == 1


@pytest.mark.parametrize("options", [{}, {"vram": "2G"}, {"exclusive": True}, {"gpus": "1", "concurrency": "2"}])
@pytest.mark.parametrize("devices", [(), (card(0, fault="nvidia-smi: no answer within 1.7 s"),)], ids=["new", "known"])
def test_a_job_waits_for_a_driver_that_does_not_answer(devices: tuple[Device, ...], options: dict[str, Any]) -> None:
    need = fitted(*devices, problems=(SILENT,), **options).need
    assert (need.devices, need.only, need.vendor) == (1, None, None)


@pytest.mark.parametrize(
    "options",
    [{"device": "0"}, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}},
     {"concurrency": "2", "gpus": "0", "max_gpu": "80", "device": "0"}],
    ids=["device", "variable", "watched"],
)  # fmt: skip
def test_devices_are_not_found_by_name_while_the_driver_does_not_answer(options: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault, match=r"no usable GPU: nvidia-smi did not answer within 1\.7 s"):
        fitted(problems=(SILENT,), **options)


def test_only_a_job_that_names_another_vendor_or_has_another_card_does_not_wait_for_the_driver() -> None:
    graphics = card(0, vendor=Vendor.INTEL, is_integrated=True)
    assert fitted(graphics, problems=(SILENT,)).need.vendor is Vendor.NVIDIA
    assert fitted(graphics, problems=(SILENT,), vendor="intel").need.vendor is Vendor.INTEL
    radeon = card(0, vendor=Vendor.AMD)
    assert fitted(radeon, problems=(SILENT,), vram="2G").need.vendor is None
    assert fitted(radeon, problems=(SILENT,), vendor="nvidia").need.vendor is Vendor.NVIDIA
    assert fitted(radeon, problems=(SILENT,), device="0").need.only == ("G0",)
    with pytest.raises(UserError, match="only 0 can be used"):
        fitted(radeon, problems=(SILENT,), vendor="intel")
