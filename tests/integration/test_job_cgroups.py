"""Limits of RAM: a program joins a real cgroup of version 2, and jobs over a tree in a folder that stands for one.

The tree in a folder has no kernel behind it: the program under test plays its part, and counts its own end.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.common.spawn_program import LEASE_AT, SpawnSpec, open_above, spawn
from tests.executables import write_executable
from tests.fakes import delegated_host
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest

MOUNTS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
# Needs 300 MB: if its limit is lower, the kernel would end it and count that. Its argument is the delegated cgroup.
NEEDS_300_MB = (
    "import os, pathlib, signal, sys\n"
    "key = f\"{os.environ['GPUYARD_JOB_ID']}.{os.environ['GPUYARD_ATTEMPT']}\"\n"
    "[group] = pathlib.Path(sys.argv[1]).glob(f'gpuyard-*-{key}')\n"
    "assert group.joinpath('cgroup.procs').read_text().split() == [str(os.getpid())]\n"
    "if int(group.joinpath('memory.max').read_text()) < 300 << 20:\n"
    "    group.joinpath('memory.events').write_text('oom_kill 1\\n')\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "print('enough')\n"
)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A real cgroup of version 2, if this user may make one."""
    mount = next((each for each in MOUNTS if (each / "cgroup.controllers").exists()), None)
    lines = Path("/proc/self/cgroup").read_text().splitlines() if mount is not None else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
    if mount is None or own is None:
        pytest.skip("no cgroup v2")
    group = mount / own / f"gpuyard-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error.strerror}")
    yield group
    with contextlib.suppress(FileNotFoundError):
        group.rmdir()


@pytest.mark.parametrize("is_script", [False, True])
def test_a_program_joins_its_cgroup_and_its_parent_does_not(cgroup: Path, tmp_path: Path, *, is_script: bool) -> None:
    program = tmp_path / "program"
    write_executable(program, f'{"" if is_script else "#!/bin/sh"}\ncat /proc/self/cgroup\necho "$1"\nexit 3\n')
    log = tmp_path / "log"
    spec = SpawnSpec((str(program), "an argument"), {"PATH": os.defpath}, "/", ((str(log), 1 << 20),), "",
                     cgroup=str(cgroup))  # fmt: skip
    before = os.getcwd()
    null = open_above(LEASE_AT)
    try:
        pid = spawn(spec, None, null)
    finally:
        os.close(null)
        os.chdir(before)
    assert cgroup.name not in Path("/proc/self/cgroup").read_text()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    lines = log.read_text().splitlines()
    assert any(line.startswith("0::") and line.endswith(cgroup.name) for line in lines), lines
    assert lines[-1] == "an argument"
    cgroup.rmdir()  # nothing is in it any more


@pytest.fixture
def limited(own_queue: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[QueueUnderTest, Path]:
    """A queue whose daemon finds a delegated cgroup, and that cgroup."""
    base = tmp_path / "root/sys/fs/cgroup/gpuyard.service"
    monkeypatch.setenv("GPUYARD_TEST_CGROUP_ROOT", str(tmp_path / "root"))
    delegated_host.make_tree(tmp_path / "root", base)
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text("[host]\nenforce_ram = true\n")
    own_queue.start(delegated_host.COMMAND)
    return own_queue, base


def test_a_job_that_reaches_its_limit_is_run_again_with_more(limited: tuple[QueueUnderTest, Path]) -> None:
    queue, base = limited
    program = (sys.executable, "-I", "-S", "-c", NEEDS_300_MB, str(base))
    job_id = queue.submit(*program, gpus=0, ram="200M")
    job = queue.until_state(job_id, "succeeded", "failed")
    assert (job["state"], job["failures"]) == ("succeeded", 0), job["reason"]
    first, second = job["attempts"]
    assert (first["outcome"], second["outcome"]) == ("out-of-memory", "succeeded")
    assert first["lack"]["total_mb"] == 200.0
    assert "the kernel ended it at its limit of RAM (--ram)" in run("show", str(job_id)).stdout
    [group] = base.glob(f"gpuyard-*-{job_id}.2")
    assert group.joinpath("memory.max").read_text() == str(300 << 20)


def test_a_job_without_a_declaration_has_no_limit(limited: tuple[QueueUnderTest, Path]) -> None:
    queue, base = limited
    job_id = queue.shell("exit 0", gpus=0)
    queue.until_state(job_id, "succeeded")
    assert not list(base.glob(f"gpuyard-*-{job_id}.*"))


def test_without_delegation_the_log_and_the_status_say_so_and_jobs_run(
    own_queue: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_TEST_CGROUP_ROOT", str(tmp_path))
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text("[host]\nenforce_ram = true\n")
    own_queue.start(delegated_host.COMMAND)
    job_id = own_queue.shell("exit 0", gpus=0, ram="200M")
    own_queue.until_state(job_id, "succeeded")
    text = "jobs run without a limit of RAM: this system has no cgroup v2"
    assert own_queue.daemon is not None
    assert text in own_queue.daemon.log
    assert text in run("daemon", "status").stdout
