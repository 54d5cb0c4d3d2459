"""An `nvidia-smi` that hangs: commands name it after one timeout, jobs for a GPU wait for it, and others start."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard import GPUScheduler
from gpuyard.errors import EnvironmentFault
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.integration.workspace_fixture import Workspaces

Tools = Callable[[str, str], Path]

HANGS = "#!/bin/sh\nexec sleep 600\n"
# A shell script, which answers within the daemon's deadline for a sample even on a slow machine.
ANSWERS = """#!/bin/sh
cat <<'END'
<nvidia_smi_log><gpu id="00000000:01:00.0"><product_name>NVIDIA Test One</product_name>
<uuid>GPU-11111111-0000-0000-0000-000000000001</uuid>
<fb_memory_usage><total>24576 MiB</total><used>0 MiB</used><free>24576 MiB</free></fb_memory_usage>
<utilization><gpu_util>0 %</gpu_util></utilization><processes></processes></gpu></nvidia_smi_log>
END
"""
SILENT = "nvidia-smi did not answer within "
# One timeout, with much time for a slow machine; waiting for the driver would take longer.
PROMPT_S = 20.0


@pytest.fixture
def hanging(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Have `nvidia-smi` hang until it is replaced."""
    monkeypatch.delenv("GPUYARD_SIMULATE", raising=False)
    tools("nvidia-smi", HANGS)
    return tools


def test_jobs_for_a_gpu_wait_until_the_driver_answers_and_others_start(
    own_queue: QueueUnderTest, hanging: Tools
) -> None:
    own_queue.start()
    started = time.monotonic()
    submitted = run("submit", "--", "echo", "hi")
    assert time.monotonic() - started < PROMPT_S
    assert (submitted.returncode, submitted.stdout) == (0, "1\n")
    assert SILENT in submitted.stderr
    assert "it waits until that answers" in submitted.stderr
    for options in ({"vram": "2G"}, {"exclusive": True}):
        assert SILENT in own_queue.send("true", **options)["notes"][0]
    own_queue.wait(own_queue.submit("true", gpus=0))
    until(lambda: all(SILENT in own_queue.why(each) for each in (1, 2, 3)), "what they wait for")
    assert run("queue").stdout.count(SILENT) == 3
    named = run("submit", "--device", "0", "--", "true")
    assert (named.returncode, SILENT in named.stderr) == (1, True)
    hanging("nvidia-smi", ANSWERS)
    own_queue.wait()
    assert own_queue.counts() == {"succeeded": 4}


def test_commands_that_take_a_gpu_at_once_name_the_tool(own_queue: QueueUnderTest, hanging: Tools) -> None:
    refused = run("run", "--", "echo", "started")
    assert (refused.returncode, refused.stdout, SILENT in refused.stderr) == (1, "", True)
    assert run("run", "--gpus", "0", "--", "echo", "started").stdout == "started\n"
    with pytest.raises(EnvironmentFault, match="nvidia-smi did not answer"), GPUScheduler():
        pass
    for command in ("devices", "doctor"):
        assert "nvidia-smi: no answer within" in run(command).stdout


def test_a_batch_names_the_tool_that_keeps_its_limits_from_being_enforced(
    own_queue: QueueUnderTest, hanging: Tools, tmp_path: Path
) -> None:
    own_queue.start()
    open_limits = ("--max-cpu", "100", "--min-free-mem-mb", "0", "--output-root", str(tmp_path / "out"))
    started = time.monotonic()
    done = run("batch", "--count", "1", "--max-gpu", "80", *open_limits, "--", "true")
    assert time.monotonic() - started < PROMPT_S
    assert f"gpuyard: --max-gpu is not enforced: {SILENT}" in done.stderr
    assert f"unchecked  --max-gpu: {SILENT}" in done.stdout
    assert done.returncode == 0


def test_a_batch_for_gpus_names_the_tool_that_it_waits_for(
    own_queue: QueueUnderTest, hanging: Tools, tmp_path: Path
) -> None:
    own_queue.start()
    open_limits = ("--max-cpu", "100", "--min-free-mem-mb", "0", "--output-root", str(tmp_path / "out"))
    assert run("batch", "--count", "1", "--gpus", "1", *open_limits, "--detach", "--", "true").returncode == 0
    until(lambda: SILENT in str(own_queue.get("/batches/1")["held_by"]), "what it waits for")
    hanging("nvidia-smi", ANSWERS)
    own_queue.wait()
    assert own_queue.counts() == {"succeeded": 2}


@pytest.mark.needs("tmux")
def test_a_task_of_a_workspace_waits_until_the_driver_answers(workspaces: Workspaces, hanging: Tools) -> None:
    workspace = workspaces.make(sessions="none")
    workspace.add("exp")
    workspace.add("without-a-gpu", scheduler={"gpus": 0})
    workspace.do("start")
    until(lambda: SILENT in (workspace.tasks()["exp"]["reason"] or ""), "what it waits for")
    workspace.until_state("without-a-gpu", "succeeded")
    hanging("nvidia-smi", ANSWERS)
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


def test_a_job_says_so_when_the_driver_begins_to_hang(own_queue: QueueUnderTest, hanging: Tools) -> None:
    hanging("nvidia-smi", ANSWERS)
    own_queue.start()
    own_queue.wait(own_queue.submit("true"))
    hanging("nvidia-smi", HANGS)
    until(lambda: own_queue.get("/devices")["devices"][0]["fault"], "the end of its answers")
    later = own_queue.submit("true")
    until(lambda: "nvidia-smi: no answer within " in own_queue.why(later), "what it waits for")
    hanging("nvidia-smi", ANSWERS)
    own_queue.wait()
    assert own_queue.counts() == {"succeeded": 2}
