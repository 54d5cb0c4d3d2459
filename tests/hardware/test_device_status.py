"""Status and metrics of a real card: memory by holder, and load."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuyard.probes.local_machine import snapshot
from tests.integration.queue_fixture import QueueUnderTest, until

OWN_MB, FOREIGN_MB = 4096, 2048
PROGRAM = (
    "import sys, torch\n"
    "held = torch.ones({mb} * 1048576, dtype=torch.uint8, device='cuda')\n"
    "torch.cuda.synchronize(); print('up', flush=True)\n"
    "{then}\n"
)
BUSY = "a = torch.ones(8192, 8192, device='cuda')\nwhile True: a = (a @ a).clamp(0, 1); torch.cuda.synchronize()"


@pytest.fixture(autouse=True)
def _card() -> None:
    pytest.importorskip("torch", reason="there is no PyTorch")
    if not any(device.vendor == "nvidia" for device in snapshot().devices):
        pytest.skip("there is no NVIDIA card")


@pytest.fixture
def queue(own_home: Path) -> Iterator[QueueUnderTest]:
    queue = QueueUnderTest(own_home)
    queue.start()
    yield queue
    queue.close()


@pytest.fixture
def foreign_process() -> Iterator[None]:
    """A foreign process that holds memory on the card."""
    program = PROGRAM.format(mb=FOREIGN_MB, then="sys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        yield
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.usefixtures("foreign_process")
def test_memory_of_jobs_and_of_foreign_processes_is_shown_separately(queue: QueueUnderTest) -> None:
    job_id = queue.submit(sys.executable, "-c", PROGRAM.format(mb=OWN_MB, then=BUSY), vram="8G")
    queue.until_state(job_id, "running")

    def card() -> Any:
        return queue.get("/devices")["devices"][0]

    until(lambda: card()["memory"]["own_used_mb"] >= OWN_MB and card()["utilization_percent"] > 50, "a job under load")
    device = card()
    memory = device["memory"]
    assert OWN_MB <= memory["own_used_mb"] < OWN_MB + 4096
    assert memory["own_mb"] == 8192
    assert FOREIGN_MB <= memory["foreign_mb"] < FOREIGN_MB + 2048
    assert [lease["job"] for lease in device["leases"]] == [job_id]
    total = memory["own_mb"] + memory["others_mb"] + memory["foreign_mb"] + memory["free_mb"]
    assert total == pytest.approx(memory["capacity_mb"], abs=1)
    values = metrics(queue)
    assert values["gpuyard_device_memory_own_used_bytes"] == pytest.approx(memory["own_used_mb"] * 1048576, rel=0.2)
    assert values["gpuyard_device_utilization_ratio"] > 0.5
    assert values["gpuyard_device_power_watts"] > 100
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.wait()
    report = queue.get("/report", since="1h")
    assert report["total"]["gpu_hours"] > 0


def metrics(queue: QueueUnderTest) -> dict[str, float]:
    """Read the metrics over the web port, as Prometheus does."""
    opened = queue.post("/web", port=0)
    address, _, token = opened["url"].partition("/?token=")
    request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}
