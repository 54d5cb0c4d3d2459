"""Which disks keep a job from starting: those of the queue keep all, that of an output keeps its job."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Job
from gpuyard.model.job_spec import DiskLimits
from gpuyard.policy.disk_and_system_limits import DiskFigure, output_folders, writes_files
from gpuyard.queue.start_pauses import DiskGate
from gpuyard.queue.transitions import JobTransitions
from tests.unit.policy.test_sizing import job

GB = 1024.0
FOLDERS = {"state": "/home/queue", "logs": "/logs"}


class Estimates:
    def __init__(self, only: Job) -> None:
        self.only = only

    def job(self, _: int) -> Job:
        return self.only


class Transitions:
    def __init__(self, only: Job) -> None:
        self.estimates = Estimates(only)


class Disks:
    """Free space by folder; a folder that is not named has plenty, None is being read."""

    def __init__(self, **free_gb: float | None) -> None:
        self.free_gb = {f"/{name.replace('_', '/')}": free for name, free in free_gb.items()}

    def figure(self, folder: str, least_mb: float) -> DiskFigure | None:
        free_gb = self.free_gb.get(folder, 100.0)
        return None if free_gb is None else DiskFigure(folder=folder, free_mb=free_gb * GB, total_mb=200 * GB)

    def known(self) -> dict[str, DiskFigure]:
        found = {folder: self.figure(folder, 0.0) for folder in [*FOLDERS.values(), *self.free_gb]}
        return {folder: figure for folder, figure in found.items() if figure is not None}


def job_with(**changes: Any) -> Job:
    submitted = job()
    return replace(submitted, spec=replace(submitted.spec, cwd="/work", **changes))


def gate(only: Job | None = None, **free_gb: float | None) -> DiskGate:
    made = DiskGate(cast("JobTransitions", Transitions(only or job())))
    made.watch(Disks(**free_gb), FOLDERS)
    return made


def test_without_disks_or_a_limit_nothing_waits() -> None:
    unwatched = DiskGate(cast("JobTransitions", Transitions(job_with(output="x.txt"))))
    assert (list(unwatched.closed_reasons(GB)), unwatched.job_reasons(1, GB), unwatched.watched()) == ([], (), [])
    assert list(gate(logs=0.0).closed_reasons(0.0)) == []


def test_nothing_starts_while_a_disk_of_the_queue_is_nearly_full() -> None:
    [reason] = gate(logs=0.5).closed_reasons(GB)
    assert reason.text == "the disk of the queue's logs (/logs) has 512 MB free < 1 GB"
    assert (reason.had, reason.needed) == (512.0, 1024.0)
    assert "min_free_disk under [host]" in reason.remedy
    assert len(list(gate(home_queue=0.5, logs=0.5).closed_reasons(GB))) == 1


def test_a_disk_without_figures_is_waited_for_unless_its_space_is_unknown() -> None:
    [reason] = gate(logs=None).closed_reasons(GB)
    assert "is being read" in reason.text
    assert gate(logs=None).notices(GB) == []

    class Dead(Disks):
        def figure(self, folder: str, least_mb: float) -> DiskFigure:
            return DiskFigure(folder=folder, silent_s=7.0)

    dead = gate(job_with(output="/net/out.txt"))
    dead.watch(Dead(), {})
    [reason] = dead.job_reasons(1, GB)
    assert reason.text == "the disk of its output (/net) has not answered for 7 s"

    class Unknown(Disks):
        def figure(self, folder: str, least_mb: float) -> DiskFigure:
            return DiskFigure(folder=folder)

    unknown = gate(job_with(output="/net/out.txt"))
    unknown.watch(Unknown(), FOLDERS)
    assert (unknown.job_reasons(1, GB), list(unknown.closed_reasons(GB))) == ((), [])


def test_a_job_waits_for_the_disk_of_its_output() -> None:
    [reason] = gate(job_with(output="/data/%j.txt"), data=0.5).job_reasons(1, GB)
    assert reason.text == "the disk of its output (/data) has 512 MB free < 1 GB"
    assert "--min-free-disk" in reason.remedy
    run = job_with(disk=DiskLimits(output_root="/big/out"))
    assert len(gate(run, big_out=0.5).job_reasons(1, GB)) == 1
    own = job_with(disk=DiskLimits(min_free_mb=50 * GB))
    [reason] = gate(own, logs=20.0).job_reasons(1, GB)
    assert "the queue's logs" in reason.text


@pytest.mark.parametrize(("limit_mb", "waits"), [(256.0, False), (0.0, False), (600.0, True), (None, True)])
def test_the_limit_of_the_job_goes_before_the_configured_one(limit_mb: float | None, waits: bool) -> None:
    own = job_with(output="/data/x.txt", disk=DiskLimits(min_free_mb=limit_mb))
    assert bool(gate(own, data=0.5).job_reasons(1, GB)) is waits


def test_the_disks_are_listed_with_what_is_on_them() -> None:
    listed = gate(data=0.5).watched()
    assert [(each.what, each.figure.folder) for each in listed] == [
        ("state", "/home/queue"),
        ("logs", "/logs"),
        ("output", "/data"),
    ]


@pytest.mark.parametrize(
    ("changes", "folders"),
    [
        pytest.param({"output": "out.txt"}, ["/work"], id="in the job's folder"),
        pytest.param({"output": "logs/%x-%j.out"}, ["/work/logs"], id="a placeholder in the name"),
        pytest.param({"output": "/a/{lr}/b/x.txt"}, ["/a"], id="a placeholder in a folder"),
        pytest.param({"output": "/x.txt"}, ["/"], id="in the root"),
        pytest.param({"output": "/a/x", "error": "/b/y"}, ["/a", "/b"], id="two files"),
        pytest.param({"output": "/a/x", "error": "/a/y"}, ["/a"], id="two files in one folder"),
        pytest.param({}, [], id="the log of the queue"),
    ],
)
def test_the_folders_of_a_jobs_output(changes: dict[str, Any], folders: list[str]) -> None:
    spec = job_with(**changes).spec
    assert list(output_folders(spec)) == folders
    assert writes_files(spec) is bool(folders)
