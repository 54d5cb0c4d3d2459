"""Fitting a batch to the machine: its runs get devices if the machine has any."""

from typing import Any

import pytest

from gpuyard.control.user_requests import fit_to_machine
from gpuyard.core.job.job import JobSpec
from gpuyard.core.job.submission import SubmissionRequest, parse_submission
from gpuyard.core.lease import FixedMemory, WholeDevice
from gpuyard.core.snapshot import Device, Host, Snapshot, Vendor
from gpuyard.errors import EnvironmentFault, UserError
from tests.unit.core.scheduling.test_placement import GB, card

BLIND = card(0, used=None, memory_total_mb=None)


def fitted(*devices: Device, **options: Any) -> JobSpec:
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    submission = parse_submission(SubmissionRequest(cwd="/", environment={}, command=("true",), options=typed))
    return fit_to_machine(submission, Snapshot(taken_at=1.0, host=Host(), devices=devices), ()).spec


def test_a_batch_without_device_options_runs_without_devices_if_the_machine_has_none() -> None:
    spec = fitted(concurrency="2", max_gpu="80", vram="2G")
    assert spec.need.devices == 0
    assert not spec.learns_memory
    assert spec.pace is not None
    assert spec.pace.max_gpu_percent == 80.0


def test_a_faulty_device_does_not_count() -> None:
    assert fitted(card(0, fault="it fell off the bus"), concurrency="2").need.devices == 0


def test_on_a_machine_with_devices_a_run_gets_one() -> None:
    spec = fitted(card(0), concurrency="2")
    assert spec.need.devices == 1
    assert spec.learns_memory


@pytest.mark.parametrize("options", [{"gpus": "1"}, {"device": "0"}], ids=["gpus", "device"])
def test_a_batch_that_asks_for_devices_is_refused_on_a_machine_without(options: dict[str, str]) -> None:
    with pytest.raises(UserError):
        fitted(concurrency="2", **options)


def test_a_single_job_is_refused_on_a_machine_without_devices() -> None:
    with pytest.raises(UserError, match="there is no usable GPU"):
        fitted()


@pytest.mark.parametrize(
    "options", [{}, {"vram": "2G"}, {"gpus": "1", "concurrency": "2"}], ids=["alone", "vram", "batch"]
)
def test_a_machine_whose_devices_cannot_be_read_now_refuses_for_now(options: dict[str, str]) -> None:
    with pytest.raises(EnvironmentFault, match="no GPU can be used now; GPU-0: too many open files"):
        fitted(Device(id="GPU-0", vendor=Vendor.NVIDIA, index=0, fault="too many open files"), **options)


def test_runs_do_not_share_devices_whose_memory_cannot_be_read() -> None:
    spec = fitted(BLIND, concurrency="2", vram="2G")
    assert spec.need.memory == WholeDevice()
    seen = fitted(BLIND, card(1), concurrency="2", vram="2G")
    assert seen.need.memory == FixedMemory(2 * GB)


def test_a_run_that_no_device_could_hold_is_refused() -> None:
    with pytest.raises(UserError):
        fitted(card(0), concurrency="2", vram="40G")


def test_a_batch_without_devices_watches_those_that_it_names() -> None:
    assert fitted(card(0), card(1), concurrency="2", gpus="0", max_gpu="80", device="1").need.only == ("G1",)
    assert fitted(card(0), concurrency="2", gpus="0", max_gpu_mem_mb="8000").need.only is None
    with pytest.raises(UserError, match="--gpus 0 asks for no GPU"):
        fitted(card(0), concurrency="2", gpus="0", device="0")
