"""The page shows the same job counts as `gpuyard queue --json`, from the first job of an array to the last."""

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


def counts_of_the_command() -> dict[str, int]:
    counts = json.loads(run("queue", "--json").stdout)["counts"]
    return {state: count for state, count in counts.items() if count}


def counts_of_the_page(page: Page) -> dict[str, int]:
    """Return the counts in the page header, without that of all jobs."""
    chips = re.findall(r"([a-z]+)\s+(\d+)", page.locator("#counts").inner_text())
    return {state: int(count) for state, count in chips if state != "all" and int(count)}


def test_the_page_and_the_command_have_the_same_counts(site: Site, page: Page) -> None:
    def agrees(stage: Callable[[dict[str, int]], bool]) -> bool:
        counts = counts_of_the_command()
        return stage(counts) and counts_of_the_page(page) == counts

    queue = site.queue
    gate = queue.gate()
    first = queue.shell(f"read word < {gate}", array="1-8", vram="12G")
    until(lambda: agrees(lambda counts: counts == {"running": 4, "queued": 4}), "four running and four queued jobs")
    queue.submit(GPUYARD, "sim-job", "--vram", "30G", "--seconds", "0", vram="1G")
    queue.post("/jobs/hold", ids=str(first + 7))
    until(lambda: agrees(lambda counts: counts.get("held") == 1), "a held job")
    queue.post("/jobs/cancel", ids=f"{first}-{first + 6}")
    until(
        lambda: agrees(lambda counts: counts.get("cancelled") == 7 and "running" not in counts), "seven cancelled jobs"
    )
    page.goto(page.url.split("#")[0] + "#/?order=id")  # each job of the array is a row
    rows = {job["id"]: job["state"] for job in json.loads(run("queue", "--all", "--json").stdout)["jobs"]}
    for job_id, state in rows.items():
        assert state in page.locator(f"tr:has(a[href='#/job/{job_id}'])").inner_text()
