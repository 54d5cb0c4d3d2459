"""Cgroups of jobs, on trees built in a folder: what is missing, limits, and what a daemon finds again."""

import os
from pathlib import Path

import pytest

from gpuyard.engines.local.job_cgroups import JobCgroups, find_delegated
from gpuyard.errors import EnvironmentFault
from gpuyard.model.out_of_memory import RamLimit

OWN = "sys/fs/cgroup/user.slice/gpuyard.service/gpuyard-daemon"


def tree(root: Path, own: str = OWN, controllers: str = "cpu memory pids") -> Path:
    """Make the cgroup of a process, and return the one that is delegated."""
    folder = root / own
    base = folder.parent if folder.name == "gpuyard-daemon" else folder
    folder.mkdir(parents=True)
    for name, text in (("cgroup.controllers", controllers), ("cgroup.subtree_control", ""), ("cgroup.procs", "")):
        (base / name).write_text(text)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory pids")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::/{own.removeprefix('sys/fs/cgroup/')}\n")
    return base


def problem(root: Path) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        find_delegated(root=root)
    return f"{caught.value} ({caught.value.hint})"


def test_the_parent_of_the_daemons_own_child_is_used_and_not_without_a_limit(tmp_path: Path) -> None:
    base = tree(tmp_path)
    assert find_delegated(root=tmp_path) == base
    groups = JobCgroups("/queue", root=tmp_path)
    assert groups.create("17.1", None) == ""
    assert (base / "cgroup.subtree_control").read_text() == "", "nothing is changed"


def test_what_is_missing_is_named_also_beside_version_1(tmp_path: Path) -> None:
    assert "has no cgroup v2" in problem(tmp_path)
    tree(tmp_path / "a", controllers="pids")
    assert "gpuyard.service has no memory controller (run the daemon" in problem(tmp_path / "a")
    tree(tmp_path / "b", own="sys/fs/cgroup/user.slice/gpuyard.service")
    assert "is in the cgroup" in problem(tmp_path / "b")
    assert "DelegateSubgroup=gpuyard-daemon" in problem(tmp_path / "b")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/unified").mkdir()
    (tmp_path / "sys/fs/cgroup/unified/cgroup.controllers").write_text("hugetlb\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n0::/\n")
    assert "as cgroup v1 has it (boot with" in problem(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cgroup_that_is_not_delegated_is_named(tmp_path: Path) -> None:
    base = tree(tmp_path)
    (base / "cgroup.procs").chmod(0o400)
    assert "cannot write to" in problem(tmp_path)


def test_a_job_gets_a_group_with_its_limit_and_the_end_says_what_happened(tmp_path: Path) -> None:
    base = tree(tmp_path)
    groups = JobCgroups("/queue", root=tmp_path)
    group = Path(groups.create("17.1", 512.0))
    assert group.parent == base
    assert (base / "cgroup.subtree_control").read_text() == "+memory"
    assert (group / "memory.max").read_text() == str(512 << 20)
    assert (group / "memory.oom.group").read_text() == "1"
    assert (group / "memory.swap.max").read_text() == "0"
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (group / "memory.peak").write_text(f"{512 << 20}\n")
    assert groups.end("17.1") == RamLimit(limit_mb=512.0, kills=2, peak_mb=512.0)
    assert groups.end("18.1") is None
    assert groups.problems() == []


def test_without_delegation_jobs_run_and_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = JobCgroups("/queue", root=tmp_path)
    assert groups.create("17.1", 512.0) == groups.create("18.1", 512.0) == ""
    (text,) = groups.problems()
    assert "jobs run without a limit of RAM: this system has no cgroup v2" in text
    assert caplog.messages == [text]


def test_a_new_daemon_finds_the_groups_of_the_last_one_and_removes_those_of_jobs_that_are_over(tmp_path: Path) -> None:
    base = tree(tmp_path)
    earlier = JobCgroups("/queue", root=tmp_path)
    live = Path(earlier.create("17.1", 512.0))
    over = base / live.name.replace("17.1", "16.1")
    over.mkdir()
    other = base / "gpuyard-0badcafe-1.1"
    other.mkdir()
    later = JobCgroups("/queue", root=tmp_path)
    later.take_over({"17.1"})
    assert (live.exists(), over.exists(), other.exists()) == (True, False, True)
    assert later.end("17.1") == RamLimit(limit_mb=512.0)
