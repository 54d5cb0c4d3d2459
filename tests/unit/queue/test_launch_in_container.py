"""What a program in a container sees of its devices."""

import pytest
from msgspec.structs import replace

from gpuyard.model.container import Container
from gpuyard.model.job import Job
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Holder, Lease, Need, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.launch_jobs import launch_of

SPEC = JobSpec(command=("train",), cwd="/work", environment={"ROCR_VISIBLE_DEVICES": "5"}, need=Need(devices=2))
JOB = Job(id=17, spec=SPEC, state=JobState.QUEUED, priority=0, user="anne", submitted_at=0.0)


class Held:
    """A lease on the last two of four devices."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        shares = tuple(Share(device_id=device.id) for device in devices[2:])
        self.lease = Lease(id="17-ab", holder=Holder(uid=1, user="anne", pid=1), shares=shares, since=0.0)
        self.descriptor = -1

    def leave(self) -> None: ...

    def release(self) -> None: ...


def devices_of(vendor: Vendor) -> tuple[Device, ...]:
    prefix = {Vendor.NVIDIA: "GPU-", Vendor.AMD: "bus-", Vendor.INTEL: "intel-", Vendor.SIMULATED: "SIM-"}[vendor]
    return tuple(Device(id=f"{prefix}{index}", vendor=vendor, index=index) for index in range(4))


@pytest.mark.parametrize(
    ("vendor", "tool", "expected"),
    [
        (Vendor.NVIDIA, None, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (Vendor.NVIDIA, "podman", {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}),
        (Vendor.AMD, "podman", {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}),
        (Vendor.AMD, "apptainer", {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}),
        (Vendor.INTEL, "docker", {"ZE_AFFINITY_MASK": "0,1"}),
        (Vendor.SIMULATED, "podman", {"CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_devices_are_named_as_in_the_container(vendor: Vendor, tool: str | None, expected: dict[str, str]) -> None:
    devices = devices_of(vendor)
    container = None if tool is None else Container(image="image", tool=tool)
    job = replace(JOB, spec=replace(SPEC, container=container))
    launch = launch_of(
        job, 1, Held(devices), Snapshot(taken_at=0.0, host=Host(), devices=devices),
        Rules(limits=SchedulingLimits(cpu_jobs=1)),
    )  # fmt: skip
    assert expected.items() <= launch.environment.items()
    assert [device.id for device in launch.devices] == ([] if tool is None else [each.id for each in devices[2:]])
