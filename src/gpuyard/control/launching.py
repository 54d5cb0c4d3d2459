"""What an attempt is started with: its command, and an environment that names its devices, its lease and itself."""

from gpuyard.core.jobs import Job
from gpuyard.core.model import Snapshot
from gpuyard.core.tasks import place_of
from gpuyard.leases.measure import LEASE_VARIABLE
from gpuyard.ports import HeldClaim, Launch
from gpuyard.visibility import visible_variables

# A job that was submitted from inside another must not be taken for it.
_OURS = frozenset(
    {"GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_ARRAY_INDEX", "GPUYARD_OOM_COUNT", "GPUYARD_QUEUE", LEASE_VARIABLE}
)


def launch_of(job: Job, number: int, held: HeldClaim | None, snapshot: Snapshot) -> Launch:
    devices = [device for share in held.lease.shares if (device := snapshot.device(share.device_id))] if held else []
    told = {name: value for name, value in job.spec.environment.items() if name not in _OURS}
    ours = {
        "GPUYARD_JOB_ID": str(job.id),
        "GPUYARD_ATTEMPT": str(number),
        "GPUYARD_OOM_COUNT": str(job.growth.count),
    }
    visible = {} if job.spec.sees_all_devices else visible_variables(devices)
    task = job.spec.task
    if task is not None and task.variable is not None and "CUDA_VISIBLE_DEVICES" in visible:
        visible = {**visible, task.variable: visible["CUDA_VISIBLE_DEVICES"]}
    if job.index is not None:
        ours["GPUYARD_ARRAY_INDEX"] = str(job.index)
    if held is not None:
        ours[LEASE_VARIABLE] = held.lease.id
    return Launch(
        job_id=job.id,
        attempt=number,
        command=job.words,
        cwd=job.spec.cwd,
        environment={**told, **visible, **ours},
        stdin=job.spec.stdin,
        folder=job.values.get("output") if job.spec.pace is not None else None,
        task=task,
        place=place_of([device.index for device in devices]),
    )
