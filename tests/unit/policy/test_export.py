"""Exported jobs: what another system gets of a job of this queue."""

import pytest
from msgspec import convert, to_builtins

from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.exported_job import ExportedJob, NotExported, pack
from gpuyard.model.job import Job
from gpuyard.model.job_spec import BatchPace, JobSpec, OnPreempt, OnReboot, Task
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Vendor

SECRET = "hunter2"
TASK = Task(workspace="/w", config="a", owner="o", marker="/w/out/a", record="/w/r")


def packed(spec: dict[str, object] | None = None, **job: object) -> ExportedJob:
    fields = {"command": ("train", "{index}"), "cwd": "/x", "environment": {"TOKEN": SECRET}, "need": Need()} | (
        spec or {}
    )
    state: dict[str, object] = {"id": 17, "state": JobState.QUEUED, "priority": 0, "user": "ada", "submitted_at": 0.0}
    made = Job(spec=JobSpec(**fields), **(state | job))  # type: ignore[arg-type]
    return pack(made, ClusterTerms(need=made.spec.need, name="train"), [])


def test_an_export_survives_json_and_has_no_values_of_variables() -> None:
    assert SECRET not in str(to_builtins(packed())), "an export never contains values of variables"
    job = packed({"need": Need(devices=2, vendor=Vendor.NVIDIA)}, index=3)
    assert convert(to_builtins(job), ExportedJob) == job, "an export survives JSON"


def test_a_command_is_a_template_only_if_the_index_alone_distinguishes_the_jobs() -> None:
    assert packed(index=3).template == ("train", "{index}")
    assert packed(index=3).argv == ("train", "3")
    assert packed(index=3, values={"seed": "4"}).template is None
    assert packed(index=3, command=("other",)).template is None
    assert packed().template is None


def test_an_export_lists_dependencies_and_whether_they_were_met() -> None:
    job = Job(
        id=17,
        spec=JobSpec(command=("true",), cwd="/", environment={}, need=Need()),
        state=JobState.BLOCKED,
        priority=0,
        user="ada",
        submitted_at=0.0,
    )
    others = [(3, DependencyKind.OK, JobState.SUCCEEDED), (4, DependencyKind.FAILED, JobState.RUNNING)]
    after = pack(job, ClusterTerms(need=Need(), name="x"), others).after
    assert [(each.job_id, each.kind, each.is_met) for each in after] == [(3, "ok", True), (4, "failed", False)]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"preempts": True}, NotExported.PREEMPTION),
        ({"on_preempt": OnPreempt.NEVER}, NotExported.PREEMPTION),
        ({"need": Need(max_utilization_percent=50.0)}, NotExported.GATES),
        ({"need": Need(max_cpu_percent=50.0)}, NotExported.GATES),
        ({"need": Need(only=("GPU-1",))}, NotExported.DEVICES),
        ({"need": Need(vendor=Vendor.AMD)}, NotExported.DEVICES),
        ({"pace": BatchPace()}, NotExported.BATCH),
        ({"task": TASK}, NotExported.TASK),
        ({"log_cap_mb": 1.0}, NotExported.LOG_CAP),
        ({"on_reboot": OnReboot.HOLD}, NotExported.REBOOT),
    ],
)
def test_an_export_lists_what_only_gpuyard_does(spec: dict[str, object], what: NotExported) -> None:
    assert set(packed(spec).stays) - set(packed().stays) == {what}


def test_the_plain_omissions_are_listed_and_described() -> None:
    assert packed().stays == (NotExported.ENVIRONMENT, NotExported.GROWTH)
    assert all(each.description for each in NotExported), "each omission has a description"
