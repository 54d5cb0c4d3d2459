"""The environment of a job: the values of a sweep, and a task that names another variable than CUDA_VISIBLE_DEVICES."""

from types import SimpleNamespace
from typing import Any

import pytest

from gpuyard.model.job import Job
from gpuyard.model.job_spec import JobSpec, Task
from gpuyard.model.lease import Holder, Lease, Need, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.queue.launch_jobs import launch_of
from tests.simulation.simulated_daemon import RULES

MIXED = Snapshot(
    taken_at=0.0,
    host=Host(),
    devices=tuple(Device(id=f"GPU-{each}", vendor=each, index=0) for each in (Vendor.NVIDIA, Vendor.AMD)),
)


@pytest.mark.parametrize(("vendor", "own", "place"), [
    (Vendor.NVIDIA, {"MY_GPUS": "0"}, "gpu-nvidia-0"),
    (Vendor.AMD, {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "GPU-amd"}, "gpu-amd-0"),
])  # fmt: skip
def test_the_variable_of_a_task_names_cuda_devices_only(vendor: Vendor, own: dict[str, str], place: str) -> None:
    task = Task(workspace="/w", config="a", owner="o", marker="/m", record="/r", variable="MY_GPUS")
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), task=task)
    job = Job(id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0)
    lease = Lease(id="a", holder=Holder(uid=0, user="", pid=1), shares=(Share(device_id=f"GPU-{vendor}"),), since=0.0)
    held: Any = SimpleNamespace(lease=lease)
    launch = launch_of(job, 1, held, MIXED, RULES)
    names = ("MY_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hidden = {"ROCR_VISIBLE_DEVICES": "-1"}
    assert {name: launch.environment[name] for name in names if name in launch.environment} == {**hidden, **own}
    assert launch.place == place


def test_a_run_of_a_sweep_has_its_values_and_its_index_in_its_environment() -> None:
    environment = {"RATE": "lr={lr}", "KEPT": "{lr}", "GPUYARD_SWEEP_OLD": "of the job that submitted it"}
    spec = JobSpec(command=("run", "{lr}"), cwd="/", environment=environment, need=Need(), filled_variables=("RATE",))
    values = {"lr": "1e-3", "Seed": "4"}
    job = Job(id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0, values=values, index=7)
    given = launch_of(job, 1, None, MIXED, RULES).environment
    own = {name: value for name, value in given.items() if name.startswith(("GPUYARD_SWEEP", "GPUYARD_ARRAY"))}
    assert own == {"GPUYARD_SWEEP_LR": "1e-3", "GPUYARD_SWEEP_SEED": "4", "GPUYARD_ARRAY_INDEX": "7"}
    assert (given["RATE"], given["KEPT"]) == ("lr=1e-3", "{lr}")
