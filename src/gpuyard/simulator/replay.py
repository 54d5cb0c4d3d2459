"""Decide an exported world again (`gpuyard why --export`), and say what the plan is and why."""

from collections.abc import Iterator

from gpuyard.core.scheduling.plan import Plan, WaitingJob
from gpuyard.core.scheduling.wait_reasons import group_by_device
from gpuyard.core.scheduling.world_file import WorldFile
from gpuyard.core.units import format_count


def plan_lines(file: WorldFile, plan: Plan) -> Iterator[str]:
    """Yield the plan: the job that the file is about first, with all of its reasons."""
    labels = file.world.machine.snapshot.labels
    about = next((each for each in plan.waiting if each.lane.id == file.lane), None)
    if about is not None:
        yield from _waiting_lines(file, about)
    for start in plan.starts:
        where = ", ".join(labels.get(share.device_id, share.device_id) for share in start.claim.shares)
        yield f"job {start.job_id} {'resumes' if start.lane.resumes else 'starts'}{f' on GPU {where}' if where else ''}"
    for preempt in plan.preempts:
        yield f"job {preempt.job_id} makes way for job {preempt.for_job}"
    if plan.head is not None:
        yield f"job {plan.head.job_id} is the first that waits"
    others = len(plan.waiting) - (about is not None)
    if others:
        yield f"{format_count(others, 'other lane')} {'waits' if others == 1 else 'wait'}"


def _waiting_lines(file: WorldFile, about: WaitingJob) -> Iterator[str]:
    behind = f": job {file.job_id} comes later in its lane" if about.job_id != file.job_id else ""
    yield f"job {about.job_id} waits{behind}"
    labels = file.world.machine.snapshot.labels
    yield from (f"  {text}" for text in group_by_device(about.reasons, labels))
    for remedy in dict.fromkeys(filter(None, (reason.remedy for reason in about.reasons))):
        yield f"  to change that: {remedy}"
