"""Sweeps on the page: one row with progress that opens into a table of runs, which can be sorted, and acts on all."""

import pytest
from playwright.sync_api import expect

from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]


def test_a_sweep_is_a_row_that_opens_into_its_runs(shown: Shown) -> None:  # noqa: F811
    options = {"gpus": 0, "hold": True}
    first = shown.queue.submit("echo", "{lr}", "{seed}", sweep=["lr=1e-3..1e-1:log3", "seed=1..8"], name="s", **options)
    apart = shown.queue.submit("echo", name="apart", **options)
    page = shown.at("/")
    rows = page.locator("#jobs-body > tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text(f"{first}-{first + 23}")
    expect(rows.first).to_contain_text("0/24 done, 24 held")
    expect(page.locator("#queue-total")).to_have_text("25 jobs")
    page.get_by_role("button", name="s", exact=True).click()
    runs = page.locator("tr.runs tbody tr")
    expect(runs).to_have_count(20)
    expect(page.locator("tr.runs thead")).to_contain_text("lr")
    expect(rows.first).to_contain_text("echo {lr} {seed}")
    shown.button("lr").click()
    shown.button("lr ↑").click()
    expect(runs.first.locator("td").nth(1)).to_have_text("1e-1")
    shown.button("lr ↓").click()
    expect(runs.first.locator("td").nth(1)).to_have_text("1e-3")
    page.locator("tr.runs").get_by_role("button", name="Next").click()
    expect(runs).to_have_count(4)
    shown.queue.post("/jobs/release", ids=str(first + 23))
    expect(rows.first).to_contain_text("1/24 done, 23 held")
    page.get_by_role("button", name="s", exact=True).click()
    expect(runs).to_have_count(0)
    page.get_by_label(f"Select job {first}-{first + 23}").check()
    expect(page.locator("#bulk")).to_contain_text("24 jobs selected")
    page.locator("#bulk").get_by_role("button", name="Cancel").click()
    page.locator("dialog[open]").get_by_role("button", name="Cancel 24").click()
    shown.queue.until_state(first, "cancelled")
    assert shown.queue.get("/jobs", ids=str(apart))["jobs"][0]["state"] == "held"
    assert not shown.faults
