"""A GPU that processes outside gpuyard keep busy: work goes to an idle one, or waits until they are done."""

import getpass
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard import GPUScheduler
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.conftest import Script
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest
from tests.integration.workspace_fixture import Workspaces, until

SEES = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
def keep_busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimulatedUse]]:
    """Have this process keep a simulated GPU busy, without a lease on it."""
    usages: list[SimulatedUse] = []

    def keep(devices: str, percent: float = 100.0, memory_mb: float = 2048) -> SimulatedUse:
        monkeypatch.setenv("GPUYARD_SIMULATE", devices)
        usages.append(SimulatedUse(SimulatedDevices(devices)))
        usages[-1].allocate("SIM-0", memory_mb)
        usages[-1].set_load("SIM-0", percent)
        return usages[-1]

    yield keep
    for usage in usages:
        usage.close()


def test_all_work_goes_to_the_idle_gpu(own_queue: QueueUnderTest, keep_busy: Callable[..., SimulatedUse]) -> None:
    keep_busy("2x24GB")
    own_queue.start()
    job_id = own_queue.submit(sys.executable, "-c", SEES)
    own_queue.wait()
    on_gpu_1 = own_queue.log_of(job_id)
    assert own_queue.job(job_id)["devices"] == ["SIM-1"]
    assert run("run", "--vram", "2G", "--", sys.executable, "-c", SEES).stdout == on_gpu_1
    for options in (
        {"vram": "2G"},
        {"memory_free_threshold_gb": 10, "power_threshold_w": None, "utilization_threshold_percent": 100},
    ):
        with GPUScheduler(**options) as gpu_ids:
            assert gpu_ids == [1]


def test_a_job_waits_for_the_only_gpu_and_why_names_the_process(
    own_queue: QueueUnderTest, keep_busy: Callable[..., SimulatedUse]
) -> None:
    foreign = keep_busy("1x24GB", 98.0)
    own_queue.start()
    job_id = own_queue.submit("echo", "started")
    expected = f"(pid {os.getpid()}, user {getpass.getuser()}) keeps it 98% busy without a lease; the limit is 50%"
    until(lambda: expected in own_queue.why(job_id), "the reason")
    assert "--max-gpu" in own_queue.why(job_id)
    beside = own_queue.submit("true", max_gpu=100)
    own_queue.wait(beside)
    assert (own_queue.state(beside), own_queue.state(job_id)) == ("succeeded", "queued")
    foreign.set_load("SIM-0", 0.0)
    own_queue.wait()
    assert own_queue.state(job_id) == "succeeded"


def test_a_foreground_command_starts_when_the_process_ends(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    foreign = script(*GPUYARD, "sim-job", "--vram", "2G", "--load", "100", "--seconds", "600")
    assert foreign.stdout is not None
    assert "holding" in foreign.stdout.readline()
    waiting = script(*GPUYARD, "run", "--vram", "2G", "--", "echo", "started")
    assert run("run", "--vram", "2G", "--wait", "0", "--", "true").returncode != 0
    foreign.kill()
    assert waiting.communicate(timeout=DEADLINE_S)[0] == "started\n"


@pytest.mark.needs("tmux")
def test_a_task_of_a_workspace_starts_when_the_process_ends(
    workspaces: Workspaces, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    foreign = script(*GPUYARD, "sim-job", "--vram", "2G", "--load", "100", "--seconds", "600")
    assert foreign.stdout is not None
    assert "holding" in foreign.stdout.readline()
    workspace = workspaces.make(sessions="none")
    workspace.add("exp")
    workspace.add("without-a-gpu", scheduler={"gpus": 0})
    workspace.do("start")
    why = f"(pid {foreign.pid}, user {getpass.getuser()}) keeps it 100% busy without a lease; the limit is 50%"
    until(lambda: why in (workspace.tasks()["exp"]["reason"] or ""), "what it waits for")
    workspace.until_state("without-a-gpu", "succeeded")
    assert (workspace.tasks()["exp"]["state"], workspace.starts("exp")) == ("queued", [])
    foreign.kill()
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


@pytest.mark.needs("tmux")
def test_a_task_of_a_workspace_goes_to_the_idle_gpu(
    workspaces: Workspaces, keep_busy: Callable[..., SimulatedUse]
) -> None:
    keep_busy("2x24GB", percent=40.0)
    workspace = workspaces.make(sessions="none")
    workspace.add("exp")
    workspace.do("start")
    workspace.until_over()
    assert workspace.tasks()["exp"]["devices"] == ["SIM-1"]


@pytest.mark.needs("tmux")
def test_the_configured_number_of_tasks_runs_beside_a_desktop(
    workspaces: Workspaces, keep_busy: Callable[..., SimulatedUse]
) -> None:
    keep_busy("1x24GB", percent=5.0, memory_mb=1536)
    workspace = workspaces.make(sessions="none", max_jobs_per_gpu=2)
    workspace.add_gated("exp1", "exp2", "exp3")
    workspace.do("start")
    workspace.until_running("exp1", "exp2")
    assert [workspace.tasks()[config]["reserved_mb"] for config in ("exp1", "exp2")] == [11.25 * 1024, 11.25 * 1024]
    assert workspace.tasks()["exp3"]["reason"].startswith("limit reached: at most 2 tasks of its workspace")
    workspace.let_go("exp1", "exp2", "exp3")
    workspace.until_over()


def test_the_limit_on_foreign_load_can_be_turned_off(
    own_queue: QueueUnderTest, keep_busy: Callable[..., SimulatedUse], own_home: Path
) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text("[queue]\nmax_foreign_load_percent = 100\n")
    keep_busy("1x24GB")
    own_queue.start()
    own_queue.wait(own_queue.submit("true"))
    assert run("run", "--vram", "2G", "--wait", "0", "--", "true").returncode == 0
