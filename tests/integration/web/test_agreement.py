"""What the page shows of a batch is what `gpuyard queue --json` says, from its first job to its last."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import until
from tests.integration.web.conftest import Site

pytestmark = [pytest.mark.usefixtures("unmeasured"), pytest.mark.needs("chromium")]
GPUYARD = str(Path(sys.executable).with_name("gpuyard"))


def as_told() -> dict[str, int]:
    counts = json.loads(run("queue", "--json").stdout)["counts"]
    return {state: count for state, count in counts.items() if count}


def as_shown(page: Page) -> dict[str, int]:
    """The counts of the head, that of all left out."""
    chips = re.findall(r"([a-z]+)\s+(\d+)", page.locator("#counts").inner_text())
    return {state: int(count) for state, count in chips if state != "all" and int(count)}


def test_a_batch_of_simulated_jobs_is_shown_as_the_queue_tells_it(site: Site, page: Page) -> None:
    def agrees(stage: Callable[[dict[str, int]], bool]) -> bool:
        told = as_told()
        return stage(told) and as_shown(page) == told

    queue = site.queue
    gate = queue.gate()
    first = queue.shell(f"read word < {gate}", array="1-8", vram="12G")
    until(lambda: agrees(lambda told: told == {"running": 4, "queued": 4}), "four that run, four that wait")
    queue.submit(GPUYARD, "sim-job", "--vram", "30G", "--seconds", "0", vram="1G")
    queue.post("/jobs/hold", ids=str(first + 7))
    until(lambda: agrees(lambda told: told.get("held") == 1), "one that is held")
    queue.post("/jobs/cancel", ids=f"{first}-{first + 6}")
    until(lambda: agrees(lambda told: told.get("cancelled") == 7 and "running" not in told), "what is left")
    rows = {job["id"]: job["state"] for job in json.loads(run("queue", "--all", "--json").stdout)["jobs"]}
    for job_id, state in rows.items():
        assert state in page.locator(f"tr:has(a[href='#/job/{job_id}'])").inner_text()
