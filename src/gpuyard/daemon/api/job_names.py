"""Names of this queue's jobs in reasons: the core knows only the id of a job that holds a lease or is ahead."""

import shlex

from msgspec.structs import replace

from gpuyard.core.lease import Holder
from gpuyard.core.scheduling.wait_reasons import Reason, brief_of, describe_holder, job_of
from gpuyard.daemon.loop import SchedulerLoop

_LONGEST_COMMAND = 40


def name_jobs(scheduler: SchedulerLoop, reason: Reason) -> Reason:
    """Return the reason, with its brief form, and with the jobs of this queue as `job 17 (train)`; jobs of other users
    keep their user's name."""
    text, brief = reason.text, brief_of(reason)
    for holder in reason.holders:
        named = _own_job(scheduler, holder)
        if named is not None:
            text, brief = (each.replace(describe_holder(holder), named) for each in (text, brief))
    return replace(reason, text=text, brief=brief)


def _own_job(scheduler: SchedulerLoop, holder: Holder) -> str | None:
    job_id, me = job_of(holder), scheduler.controller.me
    if job_id is None or (holder.uid, holder.machine) != (me.uid, me.machine):
        return None
    job = scheduler.store.job(job_id)
    if job is None:
        return None
    if job.spec.name:
        return f"job {job_id} ({job.spec.name}{'' if job.index is None else f'[{job.index}]'})"
    command = shlex.join(job.argv)
    return f"job {job_id} ({command if len(command) <= _LONGEST_COMMAND else command[: _LONGEST_COMMAND - 1] + '…'})"
