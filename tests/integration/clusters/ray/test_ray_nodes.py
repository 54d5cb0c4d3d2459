"""A queue on a real Ray with two nodes of two GPUs each: jobs are compared with one node, not with the sum."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from tests.fakes.queue_command import run
from tests.integration.clusters import scenarios
from tests.integration.clusters.conftest import configure
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.ray_cluster import GPUS, RayCluster, require_ray


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    require_ray()
    with RayCluster(tmp_path_factory.mktemp("two")) as cluster, cluster.second_node(GPUS):
        yield cluster


@pytest.fixture
def queue_there(two_nodes: RayCluster, own_queue: QueueUnderTest, unmeasured: None) -> QueueUnderTest:
    settings = f'[queue]\nengine = "ray"\n[ray]\naddress = "{two_nodes.address}"\npoll_s = 1\ngpu_memory = "24G"\n'
    configure(own_queue.home, settings)
    own_queue.start()
    return own_queue


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "3"}, "no node of ray has 3 GPUs; the largest has 2"),
        ({"gpus": "0", "cpus": "6"}, "no node of ray has 6 CPUs; the largest has 4"),
        ({"gpus": "0", "ram": "900G"}, "no node of ray has 900 GB of RAM; the largest has"),
        ({"gpus": "1", "gpu_name": "A100"}, "no node of ray has 0.001 accelerator_type:A100"),
        ({"gpus": "0", "engine_option": ["--nonsense=1"]}, "is not supported for Ray"),
    ],
)
def test_a_job_that_fits_on_no_node_is_refused(
    queue_there: QueueUnderTest, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        queue_there.shell("true", **options)
    assert refused.value.code == "impossible"
    assert queue_there.counts() == {}


def test_a_refused_submission_exits_with_4(queue_there: QueueUnderTest) -> None:
    refused = run("submit", "--gpus", "4", "--", "true")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "no node of ray has 4 GPUs; the largest has 2" in refused.stderr


def test_a_job_that_fits_on_no_node_any_more_does_not_stop_the_queue(queue_there: QueueUnderTest) -> None:
    held = queue_there.shell("true", gpus="2", hold=True)
    queue_there.post("/jobs/edit", ids=str(held), options={"gpus": "4"})
    queue_there.post("/jobs/release", ids=str(held))
    others = queue_there.shell("true", array="0-3", gpus="2")
    for index in range(4):
        queue_there.until_state(others + index, "succeeded")
    scenarios.wait_for_reason(queue_there, held, "no node of ray has 4 GPUs; the largest has 2")
    queue_there.post("/jobs/cancel", ids=str(held))
    queue_there.wait()


def test_show_prints_rays_request(queue_there: QueueUnderTest) -> None:
    job_id = queue_there.shell("true", gpus="1", vram="6G", ram="1G")
    queue_there.wait()
    shown = run("show", str(job_id)).stdout
    assert '"entrypoint_num_gpus": 0.25' in shown
    assert "entrypoint_num_gpus: declared" in shown
    assert "entrypoint_memory: declared" in shown
    assert "entrypoint_num_cpus: default" in shown


# One job at a time has this resource of the head: the queue does not count it, so that others wait at Ray.
ONE_AT_A_TIME: dict[str, Any] = {"gpus": "0", "engine_option": ['--entrypoint-resources={"node:__internal_head__": 1}']}


@pytest.fixture
def gate(queue_there: QueueUnderTest, tmp_path: Path) -> Path:
    """A job has that resource until this file exists."""
    path = tmp_path / "free"
    queue_there.shell(f"while ! [ -e {path} ]; do sleep 0.1; done", **ONE_AT_A_TIME)
    until(lambda: queue_there.counts() == {"running": 1}, "a running job")
    return path


def test_jobs_that_wait_at_ray_are_held_edited_and_moved(
    queue_there: QueueUnderTest, tmp_path: Path, gate: Path
) -> None:
    scenarios.change_jobs_that_wait_there(queue_there, tmp_path, gate, **ONE_AT_A_TIME)


def test_a_paused_queue_leaves_nothing_waiting_at_ray(queue_there: QueueUnderTest, tmp_path: Path, gate: Path) -> None:
    scenarios.pause_while_jobs_wait_there(queue_there, tmp_path, gate, **ONE_AT_A_TIME)
