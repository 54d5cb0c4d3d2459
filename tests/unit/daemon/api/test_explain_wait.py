"""What `why` advises: only what can be done about a job of this kind."""

from msgspec.structs import replace

from gpuyard.daemon.api.explain_wait import remedy_for
from gpuyard.model.job import Job
from gpuyard.model.job_spec import BatchPace, JobSpec, Task
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.wait_reasons import REMEDIES, START_WITH

SPEC = JobSpec(command=("train",), cwd="/", environment={}, need=Need())
JOB = Job(id=17, spec=SPEC, state=JobState.QUEUED, priority=0, user="ada", submitted_at=0.0)
RUN = replace(JOB, spec=replace(SPEC, pace=BatchPace()))
TASK = replace(JOB, spec=replace(SPEC, task=Task(workspace="/w", config="a", owner="o", marker="/m", record="/r")))
SMALLER = START_WITH.format(6)


def test_the_command_that_would_start_a_job_now_is_advised_where_it_can_be_edited() -> None:
    assert remedy_for(JOB, SMALLER, 0) == "`gpuyard edit 17 --vram 6G` would start it now, if that is enough"
    assert [remedy_for(JOB, SMALLER, 1), remedy_for(RUN, SMALLER, 0), remedy_for(TASK, SMALLER, 0)] == ["", "", ""]


def test_a_run_or_task_is_advised_its_own_options_or_settings() -> None:
    assert "with --run-vram SIZE" in remedy_for(RUN, REMEDIES["occupied"], 0)
    assert remedy_for(RUN, REMEDIES["host-memory"], 0).startswith("--run-ram ")
    for remedy in REMEDIES.values():
        assert "--vram" not in remedy_for(TASK, remedy, 0)
    assert remedy_for(TASK, REMEDIES["foreign-load"], 0).startswith("max_foreign_load_percent under [queue]")
    assert remedy_for(TASK, REMEDIES["drained"], 0) == REMEDIES["drained"]
