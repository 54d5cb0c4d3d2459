"""Makes what the API answers about the code of a job."""

import os

from gpuyard.core.job.code_record import CodeSnapshot, changed_script_text, commit_text
from gpuyard.core.job.job import Job
from gpuyard.daemon.code_watch import CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.code import JobCode


async def code_of(scheduler: SchedulerLoop, watch: CodeWatch, job: Job) -> JobCode:
    code, stored = job.spec.code, scheduler.store.specs.code
    is_dirty = stored.is_dirty(job.id) if code.root is not None else None
    snapshot = code.snapshot
    return JobCode(
        root=code.root,
        commit=code.commit,
        dirty=is_dirty,
        script=code.script,
        digest=code.digest,
        script_changed=await watch.is_changed(code) if snapshot is None else None,
        changed_attempts=stored.changed_scripts(job.id) if code.script is not None else (),
        snapshot=None if snapshot is None else snapshot.folder,
        snapshot_exists=None if snapshot is None else is_there(snapshot),
        text=commit_text(code.commit, is_dirty=is_dirty),
    )


def is_there(snapshot: CodeSnapshot) -> bool:
    return os.path.isdir(snapshot.folder)


def code_advice(job: Job, code: JobCode) -> list[str]:
    """Return what a user should know about the script."""
    if code.script is None or code.snapshot is not None:
        return []
    text = changed_script_text(
        code.script, is_changed=code.script_changed, attempts=code.changed_attempts, is_over=job.ended_at is not None
    )
    return [text] if text else []
