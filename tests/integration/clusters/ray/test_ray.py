"""A queue whose jobs run on a real Ray: everything is as it is with jobs that run here."""

from pathlib import Path

import pytest

from tests.integration.clusters import stories
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.ray_cluster import RayCluster
from tests.scale import size


def test_an_array_has_its_ends_and_its_logs(on_ray: QueueUnderTest) -> None:
    stories.run_an_array(on_ray, size(4, full=12))


@pytest.mark.full
def test_a_workspace_is_swept_there(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    stories.sweep_a_workspace(on_ray, tmp_path / "space", "ray")


@pytest.mark.full
def test_jobs_wait_for_each_other(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    stories.run_one_after_the_other(on_ray, tmp_path)


def test_what_runs_is_cancelled_in_good_order(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    stories.cancel_what_runs(on_ray, tmp_path)


@pytest.mark.full
def test_the_cluster_is_given_what_it_can_take_in_the_order_of_the_queue(
    on_ray: QueueUnderTest, tmp_path: Path
) -> None:
    """It has two GPUs of 24 GB: two of 12 GB share one of them, a whole one has the other, and the rest waits here."""

    def held(gate: str) -> str:
        return f"while ! [ -e {tmp_path}/{gate} ]; do sleep 0.1; done"

    halves = [on_ray.shell(held("end"), vram="12G") for _ in range(2)]
    whole = on_ray.shell(held("first"), exclusive=True)
    for job_id in (*halves, whole):
        on_ray.until_state(job_id, "running")
    low = on_ray.shell("true", exclusive=True)
    high = on_ray.shell(held("end"), exclusive=True, priority="5")
    stories.ask_why(on_ray, high, "ray has 0 GPUs free, 1 needed")
    stories.ask_why(on_ray, low, f"job {high} comes first")
    (tmp_path / "first").touch()
    on_ray.until_state(high, "running")
    assert on_ray.state(low) == "queued"
    (tmp_path / "end").touch()
    on_ray.wait()
    assert on_ray.counts() == {"succeeded": 5}


def test_one_that_runs_out_of_memory_is_given_more(on_ray: QueueUnderTest) -> None:
    stories.give_more_after_out_of_memory(on_ray)


@pytest.mark.full
def test_what_ran_there_teaches_how_much_it_takes(on_ray: QueueUnderTest) -> None:
    stories.learn_from_what_ran_there(on_ray, "ray")


@pytest.mark.full
def test_one_that_takes_too_long_is_ended(on_ray: QueueUnderTest) -> None:
    stories.end_what_takes_too_long(on_ray)


def test_jobs_outlive_the_daemon(on_ray: QueueUnderTest, tmp_path: Path) -> None:
    stories.outlive_the_daemon(on_ray, tmp_path, size(3, full=6))


@pytest.mark.full
def test_a_cluster_that_is_started_anew_has_lost_its_jobs_and_runs_them_again(
    ray_cluster: RayCluster, on_ray: QueueUnderTest, tmp_path: Path
) -> None:
    job_id = on_ray.shell(f"{stories.noting(tmp_path)} [ $GPUYARD_ATTEMPT -gt 1 ] || sleep 600; echo again")
    on_ray.until_state(job_id, "running")
    until(lambda: stories.runs_of(tmp_path, job_id) == 1, "its beginning")
    ray_cluster.stop()
    waits = on_ray.shell(stories.noting(tmp_path))
    stories.ask_why(on_ray, waits, "ray cannot be reached")
    ray_cluster.start()
    on_ray.wait()
    job = on_ray.job(job_id)
    assert (job["state"], [each["outcome"] for each in job["attempts"]]) == ("succeeded", ["lost", "succeeded"])
    assert (on_ray.log_of(job_id, 2), on_ray.state(waits)) == ("again\n", "succeeded")
    assert [stories.runs_of(tmp_path, each) for each in (job_id, waits)] == [2, 1]
