"""What users see of their jobs on a real Slurm with two nodes."""

import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.clusters import scenarios
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = needs_slurm


def test_jobs_that_wait_in_slurms_queue_are_pending_and_have_no_output(
    slurm: SlurmCluster, on_slurm: QueueUnderTest
) -> None:
    slurm.set_nodes("drain")
    try:
        first = on_slurm.shell("echo hello", gpus=0, array="0-7")
        until(lambda: on_slurm.counts() == {"pending": 8}, "eight pending jobs")
        assert "0/8 done, 8 pending" in run("queue").stdout
        logs = run("logs", str(first))
        assert (logs.returncode, logs.stdout) == (2, "")
        assert f"job {first} is pending on slurm and has no output" in logs.stderr
        assert "[keep]" not in logs.stderr
        with subprocess.Popen([*GPUYARD, "logs", "-f", str(first)], stdout=PIPE, stderr=PIPE, text=True) as following:
            assert following.stderr is not None
            assert following.stderr.readline() == f"gpuyard: job {first} is pending; waiting for it to start\n"
            slurm.set_nodes("resume")
            assert following.communicate(timeout=60)[0] == "hello\n"
    finally:
        slurm.set_nodes("resume")
    on_slurm.wait()
    assert run("logs", str(first)).stdout == "hello\n"


def test_a_job_that_slurm_suspends_is_shown_as_suspended(slurm: SlurmCluster, on_slurm: QueueUnderTest) -> None:
    job_id, gate = on_slurm.start_gated(gpus=0)
    site_id = str(on_slurm.job(job_id)["attempts"][0]["site_id"])
    slurm.suspend(site_id)
    on_slurm.until_state(job_id, "suspended")
    assert "slurm has suspended it" in on_slurm.why(job_id)
    assert "slurm has suspended it" in run("resume", str(job_id)).stderr
    on_slurm.kill9()
    on_slurm.start()
    assert on_slurm.state(job_id) == "suspended"
    slurm.resume(site_id)
    on_slurm.until_state(job_id, "running")
    gate.write_text("go\n")
    on_slurm.wait()
    assert on_slurm.state(job_id) == "succeeded"


def test_a_job_that_slurm_has_suspended_can_be_cancelled(slurm: SlurmCluster, on_slurm: QueueUnderTest) -> None:
    job_id, _ = on_slurm.start_gated(gpus=0)
    slurm.suspend(str(on_slurm.job(job_id)["attempts"][0]["site_id"]))
    on_slurm.until_state(job_id, "suspended")
    on_slurm.post("/jobs/cancel", ids=str(job_id))
    on_slurm.wait()
    assert on_slurm.state(job_id) == "cancelled"


def test_a_notification_names_the_node_on_which_the_job_failed(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    told = tmp_path / "told"
    submitted = run("submit", "--gpus", "0", "--notify", f"failed=echo $GPUYARD_TITLE > {told}", "--", "false")
    assert submitted.returncode == 0, submitted.stderr
    on_slurm.wait()
    job_id = int(submitted.stdout)
    until(lambda: told.exists() and "failed" in told.read_text(), "the notification")
    assert f"Job {job_id} failed on {on_slurm.job(job_id)['place']}\n" in told.read_text()
    assert on_slurm.job(job_id)["place"] in ("n0", "n1")


def test_the_node_and_the_gpus_of_a_job_are_shown(on_slurm: QueueUnderTest) -> None:
    job_id = on_slurm.shell("echo $SLURMD_NODENAME GPU $CUDA_VISIBLE_DEVICES", gpus="2")
    on_slurm.wait()
    where = on_slurm.log_of(job_id).strip()
    assert where.endswith(" GPU 0,1")
    assert on_slurm.job(job_id)["place"] == where
    [attempt] = [line for line in run("show", str(job_id)).stdout.splitlines() if line.startswith("      1 ")]
    assert where in attempt


def test_a_result_that_cannot_be_brought_back_is_named_by_the_job(
    on_slurm: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "project"
    (tree / "data").mkdir(parents=True)
    (tree / "runs").write_text("in the way")
    monkeypatch.chdir(tree)
    told = tmp_path / "told"
    script = "rm -f runs; mkdir runs; echo r > runs/model.pt; echo r > other"
    submitted = run(
        "submit", "--gpus", "0", "--snapshot", "--notify", f"finished=cat > {told}", "--", "sh", "-c", script
    )
    assert submitted.returncode == 0, submitted.stderr
    on_slurm.wait()
    job = on_slurm.job(int(submitted.stdout))
    assert (job["state"], (tree / "other").exists()) == ("succeeded", True), "all else is there when `wait` returns"
    assert f"its results are not in the tree: {tree}/runs/model.pt: Not a directory" in job["reason"]
    until(lambda: told.exists() and "model.pt" in told.read_text(), "the notification")


def test_a_job_gets_several_nodes_by_an_option_of_sbatch(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    tasks = "srun --overlap sh -c 'echo task $SLURM_PROCID on $SLURMD_NODENAME'"
    job_id = on_slurm.shell(
        f"until [ -e {tmp_path}/seen ]; do sleep 0.1; done; {tasks}", gpus=0, engine_option=["--nodes=2"]
    )
    until(lambda: on_slurm.job(job_id)["place"] == "n[0-1]", "the nodes of the job")
    (tmp_path / "seen").touch()
    on_slurm.wait()
    assert sorted(on_slurm.log_of(job_id).splitlines()) == ["task 0 on n0", "task 1 on n1"]
    scenarios.wait_for_reason(on_slurm, job_id, "succeeded")
