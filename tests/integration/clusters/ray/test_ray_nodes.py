"""A queue on a real Ray with two nodes of two GPUs each: jobs are compared with one node, not with the sum."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from tests.fakes.queue_command import run
from tests.free_ports import free_ports
from tests.integration.clusters import scenarios
from tests.integration.clusters.conftest import configure, start_on_ray
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.ray_cluster import GPUS, RayCluster, require_ray
from tests.scale import size, some
from tests.slurm_cluster import needs_root


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    require_ray()
    with RayCluster(tmp_path_factory.mktemp("two")) as cluster, cluster.second_node(GPUS):
        yield cluster


@pytest.fixture
def queue_there(two_nodes: RayCluster, own_queue: QueueUnderTest, unmeasured: None) -> QueueUnderTest:
    return start_on_ray(two_nodes, own_queue)


@pytest.mark.parametrize(
    ("options", "message"),
    some(
        [
            ({"gpus": "3"}, "no node of ray has 3 GPUs; the largest has 2"),
            ({"gpus": "0", "cpus": "6"}, "no node of ray has 6 CPUs; the largest has 4"),
            ({"gpus": "0", "ram": "900G"}, "no node of ray has 900 GB of RAM; the largest has"),
            ({"gpus": "1", "gpu_name": "A100"}, "no node of ray has 0.001 accelerator_type:A100"),
            ({"gpus": "0", "engine_option": ["--nonsense=1"]}, "is not supported for Ray"),
        ],
        0,
    ),
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


def test_an_edit_that_no_node_can_take_is_refused_and_changes_nothing(queue_there: QueueUnderTest) -> None:
    jobs = [queue_there.shell("true", gpus="1", hold=True) for _ in range(2)]
    here = queue_there.shell("true", gpus="0", hold=True, engine="local")
    for options in (["--gpus", "4"], ["--gpus", "3", "--engine", "ray"]):
        refused = run("edit", *map(str, jobs), str(here), *options)
        assert (refused.returncode, refused.stdout) == (4, "")
        assert "no node of ray has" in refused.stderr
    assert [queue_there.job(each)["gpus"] for each in (*jobs, here)] == [1, 1, 0]
    assert run("edit", str(here), "--gpus", "2", "--engine", "ray").returncode == 0
    queue_there.post("/jobs/release", ids="all")
    queue_there.wait()
    assert queue_there.job(here)["engine"] == "ray"
    assert queue_there.counts() == {"succeeded": 3}


@pytest.mark.full
def test_a_job_that_fits_on_no_node_any_more_does_not_stop_the_queue(queue_there: QueueUnderTest) -> None:
    good = (queue_there.home / "config.toml").read_text()
    configure(queue_there.home, good.replace(re.findall('http[^"]*', good)[0], f"http://127.0.0.1:{free_ports(1)[0]}"))
    queue_there.restart()
    held = queue_there.shell("true", gpus="4", hold=True)  # nobody can be asked
    configure(queue_there.home, good)
    queue_there.restart()
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


def test_the_node_and_the_gpus_of_a_job_are_shown(queue_there: QueueUnderTest) -> None:
    job_id = queue_there.shell("echo GPU $CUDA_VISIBLE_DEVICES", gpus="2")
    queue_there.wait()
    place = f"127.0.0.1 {queue_there.log_of(job_id).strip()}"
    assert place == "127.0.0.1 GPU 0,1"
    assert queue_there.job(job_id)["place"] == place
    assert place in run("show", str(job_id)).stdout


# One job at a time has this resource of the head: the queue does not count it, so that others wait at Ray.
ONE_AT_A_TIME: dict[str, Any] = {"gpus": "0", "engine_option": ['--entrypoint-resources={"node:__internal_head__": 1}']}


@pytest.fixture
def gate(queue_there: QueueUnderTest, tmp_path: Path) -> Path:
    """A job has that resource until this file exists."""
    path = tmp_path / "free"
    queue_there.shell(f"while ! [ -e {path} ]; do sleep 0.1; done", **ONE_AT_A_TIME)
    until(lambda: queue_there.counts() == {"running": 1}, "a running job")
    return path


@pytest.mark.full
def test_jobs_that_wait_at_ray_are_held_edited_and_moved(
    queue_there: QueueUnderTest, tmp_path: Path, gate: Path
) -> None:
    scenarios.change_jobs_that_wait_there(queue_there, tmp_path, gate, **ONE_AT_A_TIME)


@pytest.mark.full
def test_a_paused_queue_leaves_nothing_waiting_at_ray(queue_there: QueueUnderTest, tmp_path: Path, gate: Path) -> None:
    scenarios.pause_while_jobs_wait_there(queue_there, tmp_path, gate, **ONE_AT_A_TIME)


def test_doctor_checks_every_node(queue_there: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x16GB")
    answer = json.loads(run("doctor", "--engine", "ray", "--json").stdout)
    first, second = answer["nodes"]
    assert first["node"] != second["node"]
    too_small = "has a GPU of 16 GB, but `gpu_memory` in [ray] is 24 GB: lower that"
    assert first["problems"] == second["problems"] == [too_small]
    assert not answer["healthy"]


@needs_root
@pytest.mark.full
def test_jobs_on_a_node_that_does_not_see_the_folder_run_on_another(
    own_queue: QueueUnderTest, unmeasured: None, tmp_path: Path
) -> None:
    require_ray()
    own_queue.home.mkdir()
    with RayCluster(tmp_path) as cluster, cluster.second_node(GPUS, hidden=own_queue.home):
        configure(own_queue.home, f'[queue]\nengine = "ray"\n[ray]\naddress = "{cluster.address}"\npoll_s = 1\n')
        own_queue.start()
        count = size(8, full=20)
        first = own_queue.shell(scenarios.record_run(tmp_path), array=f"0-{count - 1}", gpus=0)
        until(lambda: own_queue.counts() == {"succeeded": count}, "the end of all jobs")
        [notice] = [each for each in own_queue.get("/status")["notices"] if "could not start" in each]
        assert "its supervisor could not start on 127.0.0.1: " in notice
        assert [scenarios.runs_of(tmp_path, first + index) for index in range(count)] == [1] * count
        checked = run("doctor", "--engine", "ray")
        assert checked.stdout.count(f"does not see {own_queue.home}") == 1, checked.stdout
        own_queue.stop()
