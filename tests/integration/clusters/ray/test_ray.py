"""A queue with jobs on a real Ray behaves as with local jobs."""

import time
from pathlib import Path

import psutil
import pytest

from tests.integration.clusters import scenarios
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.ray_cluster import RayCluster
from tests.scale import size, some


def test_every_job_of_an_array_has_its_outcome_and_log(on_ray: QueueUnderTest) -> None:
    scenarios.run_an_array(on_ray, size(4, full=12))


@pytest.mark.full
def test_a_workspace_is_swept_on_ray(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.sweep_a_workspace(on_ray, tmp_path / "space", "ray")


def test_a_running_job_gets_sigterm_when_cancelled(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.cancel_a_running_job(on_ray, tmp_path)


@pytest.mark.full
def test_the_queue_submits_what_fits_on_the_cluster_in_queue_order(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    """On two GPUs of 24 GB, two jobs of 12 GB share one GPU, an exclusive job has the other, the rest waits."""

    def held(gate: str) -> str:
        return f"while ! [ -e {tmp_path}/{gate} ]; do sleep 0.1; done"

    halves = [on_ray.shell(held("end"), vram="12G") for _ in range(2)]
    whole = on_ray.shell(held("first"), exclusive=True)
    for job_id in (*halves, whole):
        on_ray.until_state(job_id, "running")
    low = on_ray.shell("true", exclusive=True)
    high = on_ray.shell(held("end"), exclusive=True, priority="5")
    scenarios.wait_for_reason(on_ray, high, "ray has 0 GPUs free, 1 needed")
    scenarios.wait_for_reason(on_ray, low, f"job {high} is ahead and does not fit on ray yet")
    (tmp_path / "first").touch()
    on_ray.until_state(high, "running")
    assert on_ray.state(low) == "queued"
    (tmp_path / "end").touch()
    on_ray.wait()
    assert on_ray.counts() == {"succeeded": 5}


def test_a_job_out_of_memory_is_retried_with_more(on_ray: QueueUnderTest) -> None:
    scenarios.give_more_after_out_of_memory(on_ray)


@pytest.mark.full
def test_a_job_over_its_time_limit_is_ended(on_ray: QueueUnderTest) -> None:
    scenarios.end_a_job_over_its_time_limit(on_ray)


def test_jobs_survive_a_kill_of_the_daemon(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.survive_a_kill_of_the_daemon(on_ray, tmp_path, size(3, full=6))


@pytest.mark.full
def test_jobs_lost_in_a_restart_of_the_cluster_run_again(
    ray_cluster: RayCluster, on_ray: QueueUnderTest, tmp_path: Path
) -> None:
    job_id = on_ray.shell(f"{scenarios.record_run(tmp_path)} [ $GPUYARD_ATTEMPT -gt 1 ] || sleep 600; echo again")
    on_ray.until_state(job_id, "running")
    until(lambda: scenarios.runs_of(tmp_path, job_id) == 1, "its start")
    ray_cluster.stop()
    waits = on_ray.shell(scenarios.record_run(tmp_path))
    scenarios.wait_for_reason(on_ray, waits, "ray cannot be reached")
    ray_cluster.start()
    on_ray.wait()
    job = on_ray.job(job_id)
    assert (job["state"], [each["outcome"] for each in job["attempts"]]) == ("succeeded", ["lost", "succeeded"])
    assert (on_ray.log_of(job_id, 2), on_ray.state(waits)) == ("again\n", "succeeded")
    assert [scenarios.runs_of(tmp_path, each) for each in (job_id, waits)] == [2, 1]


@pytest.mark.parametrize("is_restarted", some([True, False], 1))
def test_a_lost_job_has_stopped_before_its_next_attempt_begins(
    ray_cluster: RayCluster, on_ray: QueueUnderTest, tmp_path: Path, *, is_restarted: bool
) -> None:
    """Its supervisor outlives Ray's own processes, and is as slow to stop it as it may be."""
    beats = f"echo $$ >{tmp_path}/pid; while :; do date +%s%N >>{tmp_path}/beats; sleep 0.02; done"
    job_id = on_ray.shell(
        f"[ $GPUYARD_ATTEMPT -gt 1 ] || {{ {beats}; }}; date +%s%N >{tmp_path}/again; sleep 3", gpus=0
    )
    until((tmp_path / "beats").exists, "its start")
    if is_restarted:
        ray_cluster.crash()
        ray_cluster.start()
    else:
        ray_cluster.kill_actor_above(int((tmp_path / "pid").read_text()))
    supervisor = psutil.Process(int((tmp_path / "pid").read_text())).parent()
    assert supervisor is not None
    supervisor.suspend()
    until(lambda: any(on_ray.home.glob("ray/submissions/*/*.lost")), "that the engine gives it up")
    given_up_at = time.monotonic()
    until(lambda: (tmp_path / "again").exists() or time.monotonic() > given_up_at + 3.0, "a poll of the supervisor")
    supervisor.resume()
    on_ray.wait()
    assert [each["outcome"] for each in on_ray.job(job_id)["attempts"]] == ["lost", "succeeded"]
    last = max(map(int, (tmp_path / "beats").read_text().split()))
    assert last < int((tmp_path / "again").read_text())


@pytest.mark.full
def test_a_program_is_warned_before_the_time_limit(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.save_before_the_time_limit(on_ray, tmp_path / "space", "ray", "1h", "USR1@3598s")
