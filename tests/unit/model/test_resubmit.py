"""Resubmission: a job keeps its options, except those that the user changes."""

import pytest
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job import Growth, Job
from gpuyard.model.job_spec import BatchPace, JobSpec, OnPreempt, OnReboot, Task
from gpuyard.model.lease import Need, UnknownMemory
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.resubmit import edited, resubmission
from gpuyard.model.submission import Submission, SubmissionRequest, parse_submission

TYPED = {
    "gpus": 2, "vram": "8G", "vendor": "nvidia", "gpu-name": "H100", "linked": True,
    "same-node": True, "max-gpu": 50, "max-power-w": 300,
    "max-gpu-mem-mb": 900, "max-cpu": 80, "ram": "4G", "name": "big", "tag": "night", "retries": 2, "time-limit": "1h",
    "grace": "0.001", "duration": "10m", "on-reboot": "requeue", "stdin": "in.txt", "log-cap": "64M", "preempt": True,
    "on-preempt": "never", "cpus": 4, "priority": 3, "device": "GPU-a,GPU-b",
}  # fmt: skip
PLAIN = JobSpec(command=("python", "train.py"), cwd="/data", environment={"A": "1"}, need=Need(memory=UnknownMemory()))


def job(spec: JobSpec = PLAIN, **facts: object) -> Job:
    known = {"id": 17, "spec": spec, "state": JobState.FAILED, "priority": 0, "user": "me", "submitted_at": 0.0}
    return Job(**{**known, **facts})  # type: ignore[arg-type]


def submitted(**options: object) -> Submission:
    return parse_submission(
        SubmissionRequest(cwd="/data", environment={"A": "1"}, command=("run",), options=dict(options))
    )


@pytest.mark.parametrize(
    "typed",
    [
        TYPED,
        {},
        {"gpus": 0},
        {"exclusive": True},
        {"exclusive": True, "vram": "2G"},
        {"engine": "slurm", "engine-option": ["--partition=big"], "cpus": 2},
    ],
)
def test_a_resubmission_keeps_all_typed_options(typed: dict[str, object]) -> None:
    before = submitted(**typed)
    only = None if before.devices is None else before.devices
    spec = replace(before.spec, need=replace(before.spec.need, only=only))
    again = resubmission(job(spec, priority=before.priority), None, {})
    assert again.spec == replace(before.spec, resubmitted_from=17)
    assert (again.priority, again.devices, again.count) == (before.priority, before.devices, 1)


def test_changed_options_replace_and_null_options_remove_the_old() -> None:
    before = job(submitted(**{**TYPED, "device": None}).spec, growth=Growth(count=1, memory_mb=9_000.0))
    again = resubmission(before, ("other", "x"), {"vram": "2G", "name": None, "priority": 9, "env": ["B=2"]})
    assert again.spec.command == ("other", "x")
    assert (again.spec.need.required_mb, again.spec.name, again.priority) == (2048.0, None, 9)
    assert (again.spec.tag, again.spec.need.vendor, again.spec.on_reboot) == ("night", Vendor.NVIDIA, OnReboot.REQUEUE)
    assert (again.spec.on_preempt, again.spec.environment) == (OnPreempt.NEVER, {"A": "1", "B": "2"})


def test_a_resubmission_elsewhere_drops_options_that_do_not_fit() -> None:
    again = resubmission(job(submitted(**TYPED).spec), None, {"gpus": 0})
    assert (again.spec.need.devices, again.spec.need.required_mb, again.devices) == (0, None, None)
    # A resubmission to a cluster drops options of this machine.
    again = resubmission(job(submitted(**TYPED).spec), None, {"engine": "slurm"})
    assert (again.spec.engine, again.spec.preempts, again.devices, again.spec.need.required_mb) == (
        "slurm", False, None, 8192.0,
    )  # fmt: skip


def test_a_resubmitted_array_element_is_one_job_with_its_own_index_and_values() -> None:
    swept = job(replace(PLAIN, command=("run", "{lr}"), is_array=True), values={"lr": "{index}"}, index=4, group=14)
    (element,) = resubmission(swept, None, {}).elements
    again = job(resubmission(swept, None, {}).spec, values=element.values, index=element.index)
    assert (again.argv, element.index, again.spec.is_array) == (("run", "{index}"), 4, False)
    env = {"LR": "{lr}", "BRACES": "{lr}"}
    swept = job(replace(PLAIN, environment=env, filled_variables=("LR",)), values={"lr": "3"})
    assert resubmission(swept, ("other",), {}).spec.environment == {"LR": "3", "BRACES": "{lr}"}
    (element,) = resubmission(job(replace(PLAIN, command=()), command=("own", "arguments")), None, {}).elements
    assert element.command == ("own", "arguments")


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        (replace(PLAIN, task=Task(workspace="/w", config="a", owner="o", marker="m", record="r")), {}, "workspace"),
        (replace(PLAIN, pace=BatchPace()), {}, "batch"),
        (PLAIN, {"array": "1-9"}, "many jobs"),
        (PLAIN, {"vram": "much"}, "size"),
        (PLAIN, {"strange": 1}, "strange"),
    ],
)
def test_a_job_that_cannot_be_resubmitted_is_refused(spec: JobSpec, options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        resubmission(job(spec), None, options)


def test_arguments_change_in_place_and_a_shell_line_is_refused() -> None:
    before = job(replace(PLAIN, command=("python", "train.py", "--lr", "{lr}")), values={"lr": "1"})
    again = resubmission(before, ("--lr", "2", "--seed", "3"), {})
    assert again.spec.command == ("python", "train.py", "--lr", "2", "--seed", "3")
    with pytest.raises(UserError, match="shell line"):
        resubmission(job(replace(PLAIN, command=("/bin/sh", "-c", "a && b"))), ("--lr", "2"), {})


def test_an_edited_job_keeps_its_place_in_an_array_and_its_origin() -> None:
    spec = replace(submitted(array="0-3", stagger="2s").spec, resubmitted_from=3)
    new = edited(job(spec, state=JobState.QUEUED, index=2, priority=1), {"vram": "2G", "name": "small"})
    assert (new.spec.is_array, new.spec.stagger_s, new.spec.resubmitted_from) == (True, 2.0, 3)
    assert (new.spec.need.required_mb, new.spec.name, new.priority) == (2048.0, "small", 1)


@pytest.mark.parametrize("option", ["array", "sweep", "after", "hold", "stagger"])
def test_options_of_a_submission_as_a_whole_cannot_be_edited(option: str) -> None:
    with pytest.raises(UserError, match=f"--{option} cannot be changed") as caught:
        edited(job(state=JobState.QUEUED), {option: "1"})
    assert caught.value.hint
