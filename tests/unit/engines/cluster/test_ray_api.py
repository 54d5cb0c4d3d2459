"""Requests to Ray and its responses. The responses are those of Ray 2.60, shortened."""

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.config import RayConfig
from gpuyard.engines.cluster.ray_api import (
    DEFAULT_ADDRESS,
    Capacity,
    RayJobRecord,
    address_of,
    capacity_of,
    free_of,
    gist,
    id_of,
    logs_of,
    records_of,
    ref_of,
    request_of,
    sighting_of,
)
from gpuyard.engines.cluster.site import ClusterSubmission, SiteRefused, SiteState, SiteUnreachable
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import Amount, ClusterTerms
from gpuyard.model.lease import FixedMemory, Need

NOW = 1_794_780_900.0
PENDING: dict[str, Any] = {
    "type": "SUBMISSION", "job_id": None, "submission_id": "gpuyard-f00d-3", "driver_info": None,
    "status": "PENDING", "entrypoint": "exec true",
    "message": "Job has not started yet. It may be waiting for resources (CPUs, GPUs) to become available.",
    "error_type": None, "start_time": 1794780881073, "end_time": None,
    "metadata": {"gpuyard": "f00d", "name": "a job"}, "runtime_env": {}, "driver_agent_http_address": None,
    "driver_node_id": None, "driver_exit_code": None,
}  # fmt: skip
RUNNING = {
    **PENDING, "status": "RUNNING", "message": "Job is currently running.",
    "driver_agent_http_address": "http://10.0.0.7:52365", "driver_node_id": "3086791fd16d25e4",
}  # fmt: skip
OVER = {**RUNNING, "end_time": 1794780887369}
FAILED = {
    **OVER, "status": "FAILED",
    "message": "Job entrypoint command failed with exit code 3, last available logs:\nhi\n",
    "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "driver_exit_code": 3,
}  # fmt: skip
DIED = {
    **OVER,
    "status": "FAILED",
    "error_type": "JOB_SUPERVISOR_ACTOR_DIED",
    "message": "Job supervisor actor died: The actor died unexpectedly before finishing this task.\n\tpid: 1060\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
}
DRIVER = {"type": "DRIVER", "job_id": "01000000", "submission_id": None, "status": "RUNNING", "entrypoint": ""}
NODES = {
    "data": {
        "result": {
            "total": 2,
            "result": [
                {"node_id": "a", "state": "ALIVE", "resources_total": {"CPU": 4.0, "GPU": 2.0, "memory": 2**30}},
                {"node_id": "b", "state": "ALIVE", "resources_total": {"CPU": 4.0, "memory": 2**30, "node:b": 1.0}},
                {"node_id": "c", "state": "DEAD", "resources_total": {"CPU": 64.0, "GPU": 8.0}},
            ],
        }
    }
}


def status_of(usage: Mapping[str, list[float]], at: float = NOW) -> bytes:
    status = {"time": at, "loadMetricsReport": {"usage": usage, "resourceDemand": []}}
    return json.dumps({"result": True, "data": {"autoscalingError": None, "clusterStatus": status}}).encode()


def record_of(response: Mapping[str, Any]) -> RayJobRecord:
    [record] = records_of(json.dumps([response]).encode())
    return record


def submission_of(
    folder: str = "/shared/f00d", command: tuple[str, ...] = ("/usr/bin/env", "true"), **terms: Any
) -> ClusterSubmission:
    asked = ClusterTerms(**{"need": Need(), "name": "a job", **terms})
    return ClusterSubmission(token="f00d", terms=asked, count=9, folder=folder, supervisor=command)


@pytest.mark.parametrize(
    ("configured", "variables", "address"),
    [
        (None, {}, DEFAULT_ADDRESS),
        (None, {"RAY_ADDRESS": "https://head:8265/"}, "https://head:8265"),
        (None, {"RAY_ADDRESS": "http://a:1", "RAY_API_SERVER_ADDRESS": "http://b:2"}, "http://b:2"),
        (None, {"RAY_ADDRESS": "auto", "RAY_API_SERVER_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),
        ("http://mine:3", {"RAY_ADDRESS": "http://a:1"}, "http://mine:3"),
        ("head:8265", {}, "http://head:8265"),
        ("https://gate/ray/", {}, "https://gate/ray"),
    ],
)
def test_the_configured_address_comes_first(configured: str | None, variables: dict[str, str], address: str) -> None:
    assert address_of(RayConfig(address=configured), variables) == address


@pytest.mark.parametrize("address", ["", "ray://head:10001", "http://", "http://head:many", "http://[::1"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(EnvironmentFault, match="is not the address of a Ray dashboard"):
        address_of(RayConfig(address=address), {})


@given(st.from_regex(r"[0-9a-z-]{1,20}", fullmatch=True), st.integers(0, 10**6))
def test_an_element_is_found_again_by_its_id(token: str, index: int) -> None:
    assert ref_of(id_of(token, index)) == (token, index)


@pytest.mark.parametrize(
    "other", [None, "", "raysubmit_4LamXRuQpYdSMg7J", "gpuyard-", "gpuyard-3", "gpuyard-a-b", "a-3"]
)
def test_jobs_of_other_origin_are_ignored(other: str | None) -> None:
    assert ref_of(other) is None


def test_the_request_contains_the_terms_that_are_set_and_any_name() -> None:
    share = Need(memory=FixedMemory(6000.0))
    asked = request_of(submission_of(need=share, cpus=3, ram_mb=100.5), 3, card_mb=24_000.0)
    assert asked["submission_id"] == "gpuyard-f00d-3"
    assert asked["metadata"] == {"gpuyard": "f00d", "name": "a job"}
    assert asked["entrypoint_num_gpus"] == 0.25
    assert asked["entrypoint_num_cpus"] == 3
    assert asked["entrypoint_memory"] == math.ceil(100.5 * 1048576)
    assert int(asked["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) == 10
    asked = request_of(submission_of(need=Need(devices=0), cpus=2), 0, card_mb=None)
    assert [name for name in asked if name.startswith("entrypoint_")] == ["entrypoint_num_cpus"]
    asked = request_of(submission_of(name="half \udce4"), 0, None)
    assert asked["metadata"]["name"].encode() == b"half \\udce4"


def test_a_model_and_options_become_resources_and_labels() -> None:
    options = ('--entrypoint-resources={"fast_disk": 1}', '--entrypoint-label-selector={"zone": "b"}')
    asked = request_of(submission_of(need=Need(model="H100"), options=options), 0, None)
    assert asked["entrypoint_resources"] == {"accelerator_type:H100": 0.001, "fast_disk": 1}
    assert asked["entrypoint_label_selector"] == {"zone": "b"}


@pytest.mark.parametrize("option", ["--partition=big", "--entrypoint-resources=fast", "--entrypoint-resources=3", ""])
def test_an_option_that_ray_does_not_have_is_refused(option: str) -> None:
    with pytest.raises(SiteRefused, match="is not supported for Ray") as refusal:
        request_of(submission_of(options=(option,)), 0, None)
    assert "--entrypoint-resources=" in (refusal.value.hint or "")


def run_entrypoint(submission: ClusterSubmission, path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", "-c", request_of(submission, 7, None)["entrypoint"]]
    environment = None if path is None else {"PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", [None, "/nowhere"])
def test_the_entrypoint_passes_every_argument_unchanged(tmp_path: Path, path: str | None) -> None:
    folder = tmp_path / "a 'folder' of $HOME"
    folder.mkdir()
    command = ("/bin/sh", "-c", 'echo "$1|$2"; exit 9', "sh", str(folder))
    ran = run_entrypoint(submission_of(str(folder), command), path)
    assert (ran.returncode, ran.stdout) == (9, f"{folder}|7\n")


def test_the_entrypoint_reports_a_file_that_the_node_cannot_see(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    ran = run_entrypoint(submission_of(absent, ("/bin/echo", "ran")))
    assert ran.returncode == 127
    assert f"this node has no {absent}:" in ran.stdout
    assert "ran" not in ran.stdout.splitlines()


def state_of(
    response: Mapping[str, Any], *, is_stopped: bool = False, pending_s: float = 0.0
) -> tuple[SiteState, int | None, str]:
    sighting = sighting_of(record_of(response), is_stopped=is_stopped, pending_s=pending_s)
    return sighting.at, sighting.status, sighting.reason


def test_a_pending_job_has_a_reason_until_it_is_stopped_or_too_old() -> None:
    at, status, reason = state_of(PENDING)
    assert (at, status) == (SiteState.PENDING, None)
    assert "waiting for resources" in reason
    assert state_of(PENDING, is_stopped=True)[0] is SiteState.CANCELLED
    assert state_of(PENDING, pending_s=15 * 60)[0] is SiteState.PENDING
    assert state_of(PENDING, pending_s=30 * 60)[0] is SiteState.LOST


def test_a_running_job_has_a_node_also_with_an_unknown_status() -> None:
    sighting = sighting_of(record_of(RUNNING), is_stopped=True)
    assert (sighting.at, sighting.place, sighting.id) == (SiteState.RUNNING, "10.0.0.7", "gpuyard-f00d-3")
    without_agent = sighting_of(record_of({**RUNNING, "driver_agent_http_address": None}))
    assert without_agent.place == "3086791fd16d25e4"
    assert state_of({**RUNNING, "status": "ASCENDING"})[0] is SiteState.RUNNING


def test_an_ended_job_has_a_status_and_a_time_or_is_lost() -> None:
    assert state_of({**OVER, "status": "SUCCEEDED", "driver_exit_code": 0})[:2] == (SiteState.SUCCEEDED, 0)
    assert state_of({**OVER, "status": "STOPPED"})[:2] == (SiteState.CANCELLED, None)
    assert state_of(FAILED)[:2] == (SiteState.FAILED, 3)
    assert sighting_of(record_of(FAILED)).ended_at == 1794780887.369
    assert state_of({**FAILED, "driver_exit_code": -9})[:2] == (SiteState.FAILED, 137)
    at, status, reason = state_of(DIED)
    assert (at, status) == (SiteState.LOST, None)
    assert reason == "Job supervisor actor died: The actor died unexpectedly before finishing this task."
    by_monitor = "Unexpected error occurred: 1 worker(s) were killed due to the node running low on memory. Memory on …"
    by_exit = "Job supervisor actor died: …\nWorker exit type: NODE_OUT_OF_MEMORY Worker exit detail: …"
    for message in (by_monitor, by_exit):
        assert state_of({**DIED, "message": message})[0] is SiteState.OUT_OF_MEMORY


def test_answers_are_read_whatever_they_hold() -> None:
    records = records_of(json.dumps([DRIVER, {**FAILED, "message": "half \udce4"}]).encode())
    assert [ref_of(record.submission_id) for record in records] == [None, ("f00d", 3)]
    assert logs_of(b'{"logs": "half \\udce4"}') == b"half ?"
    assert gist("Traceback (most recent call last):\n  File …\nValueError: no!\n.\n.\n") == "ValueError: no!"
    assert gist("first\nsecond") == "first"
    assert gist("\n") == ""


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}", b"[1]", b'[{"status": 1}]'])
def test_a_malformed_response_is_an_error(answer: bytes) -> None:
    with pytest.raises(SiteUnreachable, match="cannot be understood"):
        records_of(answer)


def test_only_the_resources_of_live_nodes_count() -> None:
    capacity = capacity_of(json.dumps(NODES).encode(), status_of({}))
    assert capacity.nodes == (Amount(gpus=2.0, cpus=4.0, ram_mb=1024.0), Amount(gpus=0.0, cpus=4.0, ram_mb=1024.0))


@pytest.mark.parametrize("status", [b'{"data": {"clusterStatus": null}}', b'{"data": {"clusterStatus": {"time": 1}}}'])
def test_without_a_usage_report_all_is_free_except_our_own_jobs(status: bytes) -> None:
    capacity = capacity_of(json.dumps(NODES).encode(), status)
    ours = [(record_of(RUNNING), Amount(gpus=0.5, cpus=1.0))]
    assert free_of(capacity, ours) == Amount(gpus=1.5, cpus=7.0, ram_mb=2048.0)


TWO = Capacity(nodes=(Amount(gpus=2.0, cpus=4.0, ram_mb=100.0),), used=Amount(gpus=1.0, cpus=1.0, ram_mb=10.0), at=NOW)
ONE = Amount(gpus=1.0, cpus=1.0, ram_mb=10.0)


def job_record(status: str, *, began: float, ended: float | None = None) -> RayJobRecord:
    """Return a record; times are in seconds relative to the usage report."""
    end = None if ended is None else (NOW + ended) * 1000
    return RayJobRecord(status=status, start_time=(NOW + began) * 1000, end_time=end)


@pytest.mark.parametrize(
    ("record", "gpus"),
    [
        (job_record("RUNNING", began=-60), 1.0),  # the report counts it
        (job_record("RUNNING", began=1), 0.0),  # started after the report, which counts another job
        (job_record("PENDING", began=-60), 0.0),  # it will need the rest
        (job_record("SUCCEEDED", began=-60, ended=2), 2.0),  # the report counts it, and it has ended since
        (
            job_record("SUCCEEDED", began=-60, ended=-0.5),
            2.0,
        ),  # ended so shortly before that the report still counts it
        (job_record("FAILED", began=-60, ended=-30), 1.0),  # ended before the report
    ],
)
def test_our_own_job_is_counted_once(record: RayJobRecord, gpus: float) -> None:
    assert free_of(TWO, [(record, ONE)]).gpus == gpus


@given(st.lists(st.sampled_from(["PENDING", "RUNNING", "SUCCEEDED"]), max_size=8), st.floats(0, 4), st.floats(0, 4))
def test_the_free_gpus_never_exceed_the_total_minus_our_own(statuses: list[str], total: float, used: float) -> None:
    capacity = Capacity(nodes=(Amount(gpus=total, cpus=0.0, ram_mb=0.0),), used=Amount(gpus=used), at=NOW)
    ours = [(job_record(status, began=-9, ended=9 if status == "SUCCEEDED" else None), ONE) for status in statuses]
    gpus = free_of(capacity, ours).gpus
    held = len([status for status in statuses if status != "SUCCEEDED"])
    assert gpus is not None
    assert 0.0 <= gpus <= max(0.0, total - held)
