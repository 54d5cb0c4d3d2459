"""Energy, the power limit and free disk space with a real daemon, real jobs and simulated GPUs."""

import json
import os
from pathlib import Path

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.integration.test_metrics import scrape

# A simulated GPU draws 25 W at rest and 300 W at full load.
IDLE_W, FULL_W = 25.0, 300.0


def configure(queue: QueueUnderTest, text: str) -> None:
    queue.home.mkdir(mode=0o700, exist_ok=True)
    (queue.home / "config.toml").write_text(text)


def test_the_energy_of_a_job_is_in_show_report_and_metrics(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    configure(queue, "[energy]\nprice = 0.5\ncurrency = 'CHF'\ngco2_per_kwh = 100\n")
    queue.start()
    job_id = queue.submit(
        *GPUYARD, "sim-job", "--vram", "2G", "--load", "100", "--seconds", "3", environment=dict(os.environ)
    )
    assert queue.wait(job_id)["succeeded"] == 1
    job = queue.job(job_id)
    energy, ran_s = job["energy"], job["attempts"][0]["ran_s"]
    assert job["attempts"][0]["energy"] == energy
    assert energy["measured_s"] == pytest.approx(ran_s, abs=0.5)
    assert IDLE_W * ran_s < energy["joules"] <= FULL_W * ran_s * 1.01
    assert (energy["basis"], energy["currency"]) == ("power", "CHF")
    assert energy["cost"] == pytest.approx(energy["joules"] / 3.6e6 * 0.5)
    assert energy["co2e_g"] == pytest.approx(energy["joules"] / 3.6e6 * 100)
    total = json.loads(run("report", "--json").stdout)["total"]["energy"]
    assert total["kwh"] == pytest.approx(energy["kwh"])
    assert total["worked_gpu_hours"] + total["idle_gpu_hours"] == pytest.approx(energy["measured_s"] / 3600)
    assert "CHF" in run("report").stdout
    assert "CHF" in run("show", str(job_id)).stdout
    seen = scrape(queue)
    assert seen["gpuyard_energy_joules_total", ""] == pytest.approx(energy["joules"])
    assert seen["gpuyard_energy_cost_total", "CHF"] == pytest.approx(energy["cost"])
    assert seen["gpuyard_disk_free_bytes", str(queue.home)] > 0


def test_a_job_waits_while_all_gpus_would_draw_too_much(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    configure(queue, "[host]\nmax_gpu_power_w = 400\n")
    queue.start()
    _, gate = queue.start_gated()
    second = queue.submit("true", exclusive=True)
    until(lambda: "at most 400 W are allowed" in queue.why(second), "the reason")
    gate.write_text("go\n")
    assert queue.wait()["succeeded"] == 2


def test_no_job_starts_on_a_full_disk_and_all_start_when_there_is_space(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    configure(queue, "[host]\nmin_free_disk = '900000T'\n")
    queue.start()
    job_id = queue.submit("true", gpus=0)
    until(lambda: "free < " in queue.why(job_id), "the reason")
    assert any("no job starts: the disk of the queue" in each for each in queue.get("/status")["notices"])
    doctor = run("doctor")
    assert doctor.returncode == 1
    assert "no job starts: the disk of the queue" in doctor.stdout
    assert {disk["what"] for disk in queue.get("/devices")["disks"]} == {"state", "logs"}
    configure(queue, "[host]\nmin_free_disk = '0'\n")
    assert queue.wait(job_id)["succeeded"] == 1


def test_only_a_job_that_writes_to_the_full_disk_waits(own_queue: QueueUnderTest, tmp_path: Path) -> None:
    queue = own_queue
    queue.start()
    output = str(tmp_path / "logs" / "%j.txt")
    waits = queue.submit("true", gpus=0, output=output, **{"min-free-disk": "900000T"})
    free = queue.submit("echo", "hello", gpus=0, output=output, **{"min-free-disk": "0"})
    assert queue.wait(free)["succeeded"] == 1
    assert (tmp_path / "logs" / f"{free}.txt").read_text() == "hello\n"
    until(lambda: "the disk of its output" in queue.why(waits), "the reason")
    queue.client.request("POST", "/jobs/cancel", body={"ids": str(waits)})
