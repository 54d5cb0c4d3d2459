"""Clusters that do not answer: `doctor` says so in time, and a job for one says only that."""

import json
import socket
import threading
from pathlib import Path

import pytest

from gpuyard.engines.cluster import site_checks as reach_site
from gpuyard.engines.cluster.site import Site
from gpuyard.engines.cluster.site_checks import unreachable_sites
from gpuyard.errors import EnvironmentFault
from tests.executables import write_executable
from tests.fakes.queue_command import run
from tests.free_ports import free_ports
from tests.integration.queue_fixture import QueueUnderTest, until


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> str:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    return address


def engine(name: str) -> dict[str, object]:
    found = run("doctor", "--json")
    assert found.returncode == 0, "a cluster that does not answer is no fault of this machine"
    return next(each for each in json.loads(found.stdout)["engines"] if each["name"] == name)


def test_doctor_asks_the_address_of_ray(own_home: Path, no_ray: str) -> None:
    ray = engine("ray")
    assert ray["works"] is False
    assert str(ray["problem"]).startswith(f"cannot be reached: there is no answer from a Ray dashboard at {no_ray}")


def test_doctor_asks_the_controller_of_slurm(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_ray: str
) -> None:
    for name, body in (("sbatch", "exit 0"), ("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")):
        write_executable(tmp_path / name, f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "Unable to contact slurm controller" in str(engine("slurm")["problem"])
    write_executable(tmp_path / "squeue", "#!/bin/sh\nexit 0\n")
    assert engine("slurm")["works"] is True


def test_a_server_that_never_answers_does_not_hold_doctor_up(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "timed out" in str(engine("ray")["problem"])


def test_a_site_that_hangs_for_ever_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_site, "WITHIN_S", 0.0)
    monkeypatch.setattr(reach_site, "_TO_REPORT_S", 0.01)
    is_over = threading.Event()

    def hang() -> Site:
        is_over.wait()
        raise EnvironmentFault("too late")

    try:
        assert unreachable_sites({"slow": hang}) == {"slow": "no answer within 0 s"}
    finally:
        is_over.set()


def test_a_job_for_a_cluster_that_cannot_be_reached_says_only_that(own_queue: QueueUnderTest, no_ray: str) -> None:
    queue = own_queue
    queue.start()
    first, second = (queue.submit("true", engine="ray") for _ in range(2))
    until(lambda: "cannot be reached" in queue.why(second), "the engine's trouble")
    for job in (first, second):
        answer = queue.get(f"/jobs/{job}/why")
        (reason,) = answer["reasons"]
        assert reason["text"].startswith(f"ray cannot be reached: there is no answer from a Ray dashboard at {no_ray}")
        assert (answer["ahead"], answer["estimate"]) == (None, "")
    assert "no start estimate" not in run("why", str(second)).stdout
    assert run("queue").stdout.count("ray cannot be reached") == 2
