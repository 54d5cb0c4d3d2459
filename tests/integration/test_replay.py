"""`gpuyard why ID --export FILE` and `gpuyard simulate replay FILE`: the plan is made again, with the same reasons."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.queue_fixture import QueueUnderTest, until


def run(*arguments: str) -> Any:
    command = [sys.executable, "-m", "gpuyard", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)


def test_an_exported_world_is_decided_again_with_the_reasons_of_why(queue: QueueUnderTest, tmp_path: Path) -> None:
    _, gate = queue.start_gated()
    waiting = queue.submit("python", "train.py", "--token=hush", gpus=2, exclusive=True)
    until(lambda: queue.get(f"/jobs/{waiting}/why")["reasons"], "a reason")
    path = tmp_path / "world.json"
    done = run("why", str(waiting), "--export", str(path))
    assert done.returncode == 0, done.stderr
    assert "hush" not in path.read_text()
    why = json.loads(run("why", str(waiting), "--json").stdout)
    replayed = run("simulate", "replay", str(path), "--json")
    assert replayed.returncode == 0, replayed.stderr
    [job] = [each for each in json.loads(replayed.stdout)["waiting"] if each["job_id"] == waiting]
    keys = ("kind", "device_id", "had", "needed", "holders", "remedy")
    assert [[each[key] for key in keys] for each in job["reasons"]] == [
        [each[key] for key in keys] for each in why["reasons"]
    ]
    assert f"job {waiting} waits" in run("simulate", "replay", str(path)).stdout
    later = queue.submit("true", gpus=2, exclusive=True, priority=-3)
    done = run("why", str(later), "--export", str(path))
    assert done.returncode == 0, done.stderr
    assert (
        f"ahead of it, with jobs like them: job {waiting} (priority 0)" in run("simulate", "replay", str(path)).stdout
    )
    world = json.loads(path.read_text())
    path.write_text(json.dumps({**world, "lane": -1}))
    assert "change `job_id` and `lane` together" in run("simulate", "replay", str(path)).stderr
    gate.write_text("go\n")
    queue.wait()
    refused = run("why", str(waiting), "--export", str(path))
    assert refused.returncode != 0
    assert "no plan is made about job" in refused.stderr
