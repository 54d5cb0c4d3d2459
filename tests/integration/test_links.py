"""Links between GPUs, from the machine to a job's devices: simulated GPUs, the real daemon, commands and scripts."""

import json
import re

import pytest

from gpuyard import GPUScheduler
from gpuyard.errors import UserError
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.conftest import Script
from tests.integration.queue_fixture import QueueUnderTest, until

EIGHT = "8x24GB:links=0-3,4-7:nodes=0-3,4-7"


@pytest.fixture
def linked(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    """A queue on eight GPUs: two groups of four, each on a NUMA node."""
    monkeypatch.setenv("GPUYARD_SIMULATE", EIGHT)
    own_queue.start()
    return own_queue


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four simulated GPUs in two pairs, without a queue."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "4x24GB:links=0+2,1+3:nodes=0-1,2-3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def devices_of(queue: QueueUnderTest, job_id: int) -> list[str]:
    queue.until_state(job_id, "running")
    found: list[str] = queue.job(job_id)["gpu_labels"]
    return found


@pytest.mark.usefixtures("own_home", "four")
def test_devices_shows_the_matrix_and_what_its_words_mean() -> None:
    assert run("devices", "--topology").stdout.splitlines() == [
        "       node  0       1       2       3",
        "GPU 0     0  X       node    NV12    across",
        "GPU 1     0  node    X       across  NV12",
        "GPU 2     1  NV12    across  X       node",
        "GPU 3     1  across  NV12    node    X",
        "",
        "NV: NVLink, and how many; node: a NUMA node; across: across NUMA nodes",
    ]


@pytest.mark.usefixtures("own_home", "four")
def test_devices_prints_the_topology_as_json() -> None:
    found = json.loads(run("devices", "--topology", "--json").stdout)
    assert found["nodes"] == {"SIM-0": 0, "SIM-1": 0, "SIM-2": 1, "SIM-3": 1}
    assert found["links"][1] == {"one": "SIM-0", "other": "SIM-2", "kind": "nvlink", "count": 12}
    assert found["labels"] == {"SIM-0": "0", "SIM-1": "1", "SIM-2": "2", "SIM-3": "3"}


@pytest.mark.usefixtures("own_home")
def test_links_that_do_not_fit_the_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB:links=0-3")
    refused = run("devices")
    assert refused.returncode == 2
    assert "links= names GPU 3, and there are 2 simulated GPUs" in refused.stderr


@pytest.mark.usefixtures("own_home")
def test_a_comparison_of_policies_refuses_links_that_it_would_ignore() -> None:
    refused = run("simulate", "--mix", "lucid", "--devices", "2x24GB:links=0-1")
    assert refused.returncode == 2
    assert "without links" in refused.stderr


def test_jobs_get_linked_sets_and_single_ones_stay_out_of_them(linked: QueueUnderTest) -> None:
    first, _ = linked.start_gated("a", exclusive=True)
    second, _ = linked.start_gated("b", exclusive=True)
    wide, _ = linked.start_gated("c", exclusive=True, gpus=4)
    assert devices_of(linked, first) == ["0"]
    assert devices_of(linked, second) == ["1"]
    assert devices_of(linked, wide) == ["4", "5", "6", "7"]


def test_a_linked_job_waits_for_a_set_says_so_and_gets_it(linked: QueueUnderTest) -> None:
    _, in_first = linked.start_gated("a", exclusive=True, device="1")
    linked.start_gated("b", exclusive=True, device="5")
    wide = linked.shell(f"read word < {linked.gate('c')}", exclusive=True, gpus=4, linked=True)
    linked.until_state(wide, "queued")
    until(lambda: linked.get(f"/jobs/{wide}/why")["reasons"], "the reasons of its wait")
    assert "6 GPUs available now, but not 4 that are joined by NVLink or XGMI" in linked.why(wide)
    assert "only GPU 0, 2, 3; GPU 4, 6, 7" in linked.why(wide)
    assert "limits: GPUs joined by NVLink or XGMI" in run("show", str(wide)).stdout
    in_first.write_text("end\n")
    assert devices_of(linked, wide) == ["0", "1", "2", "3"]


def test_a_job_that_no_set_could_serve_is_refused_with_what_there_is(linked: QueueUnderTest) -> None:
    refused = run("submit", "--gpus", "5", "--same-node", "--", "true")
    assert refused.returncode == 4
    assert "5 GPUs on one NUMA node needed; this machine has GPU 0, 1, 2, 3; GPU 4, 5, 6, 7" in refused.stderr
    assert "leave out --linked and --same-node" in refused.stderr


@pytest.mark.parametrize("command", ["submit", "run"])
@pytest.mark.usefixtures("linked")
def test_links_of_one_gpu_are_refused(command: str) -> None:
    refused = run(command, "--linked", "--same-node", "--", "true")
    assert refused.returncode == 2
    assert "--linked and --same-node are for several GPUs" in refused.stderr
    assert "add --gpus 2" in refused.stderr


@pytest.mark.parametrize("engine", ["slurm", "ray"])
@pytest.mark.usefixtures("linked")
def test_a_cluster_refuses_what_it_could_not_keep(engine: str) -> None:
    refused = run("submit", "--engine", engine, "--gpus", "2", "--linked", "--", "true")
    assert refused.returncode == 2
    assert f"--linked is about this machine, and {engine} places the job itself" in refused.stderr


def test_the_page_gets_the_links_of_each_device(linked: QueueUnderTest) -> None:
    rows = linked.get("/devices")["devices"]
    assert [(row["numa_node"], row["linked_to"]) for row in rows[3:5]] == [(0, ["0", "1", "2"]), (1, ["5", "6", "7"])]


@pytest.mark.usefixtures("own_home", "four")
def test_run_gets_a_linked_pair_and_chooses_one_inside_it() -> None:
    show = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    done = run("run", "--gpus", "2", "--linked", "--", *show)
    assert done.stdout == "0,2\n"
    inside = run("run", "--gpus", "4", "--", *GPUYARD, "run", "--gpus", "2", "--linked", "--", *show)
    assert inside.stdout == "0,2\n", inside.stderr


@pytest.mark.usefixtures("own_home", "four")
def test_a_script_waits_for_a_linked_pair(script: Script) -> None:
    holder = script(num_gpus=2, specific_gpus=[0, 1])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "[0, 1]\n"
    lines: list[str] = []
    with pytest.raises(TimeoutError):
        GPUScheduler(num_gpus=2, linked=True, max_wait_time=0.2, poll_interval=0.05, progress=lines.append).acquire()
    assert re.search(r"2 GPUs available now, but not 2 that are joined by NVLink or XGMI", lines[0])
    with GPUScheduler(num_gpus=2, same_node=True) as gpu_ids:
        assert gpu_ids == [2, 3]


@pytest.mark.usefixtures("own_home", "four")
def test_a_script_is_refused_what_the_machine_does_not_have() -> None:
    with pytest.raises(UserError, match="linked is for several GPUs"):
        GPUScheduler(linked=True)
    with pytest.raises(UserError, match="this machine has GPU 0, 2; GPU 1, 3"):
        GPUScheduler(num_gpus=3, linked=True).acquire()
