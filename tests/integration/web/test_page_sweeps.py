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
    page.locator("tr.runs").get_by_role("button", name="lr").click()
    expect(page.get_by_role("columnheader", name="lr")).to_have_attribute("aria-sort", "ascending")
    page.locator("tr.runs").get_by_role("button", name="lr").click()
    expect(runs.first.locator("td").nth(1)).to_have_text("1e-1")
    page.locator("tr.runs").get_by_role("button", name="lr").click()
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
    page.locator("dialog[open]").get_by_role("button", name="Cancel 23").click()
    shown.queue.until_state(first, "cancelled")
    assert shown.queue.get("/jobs", ids=str(apart))["jobs"][0]["state"] == "held"
    page.locator("#bulk").get_by_role("button", name="Clear").click()
    assert not shown.faults


def test_the_selection_of_a_sweep_is_that_of_its_runs_and_sorting_lists_them(shown: Shown) -> None:  # noqa: F811
    first = shown.queue.submit("echo", "{lr}", sweep=["lr=1,2,3"], name="chosen", gpus=0, hold=True)
    shown.queue.post("/jobs/cancel", ids=str(first))
    page = shown.at("/")
    bulk = page.locator("#bulk")
    page.get_by_label(f"Select job {first}-{first + 2}").check()
    expect(bulk).to_contain_text("3 jobs selected")
    bulk.get_by_role("button", name="Release 2").click()
    shown.queue.until_state(first + 2, "succeeded")
    expect(bulk.get_by_role("button", name="Release")).to_be_hidden()
    expect(bulk.get_by_role("button", name="Retry")).to_have_text("Retry")
    page.locator("#jobs-head").get_by_role("button", name="Job").click()
    expect(page.locator("#jobs-body > tr", has_text="chosen")).to_have_count(3)
    expect(bulk).to_be_hidden()
    expect(page.locator("#jobs-body > tr").first).to_contain_text("chosen lr=3")
    assert not shown.faults


def test_the_figures_of_runs_are_columns_that_sort(shown: Shown) -> None:  # noqa: F811
    script = "echo epoch 1/2 val_loss=0.{by}; sleep 1.1"
    first = shown.queue.submit("sh", "-c", script, sweep=["by=7,3,5"], name="figures", gpus=0)
    page = shown.at("/")
    page.get_by_role("button", name="figures", exact=True).click()
    table = page.locator("tr.runs")
    table.get_by_role("button", name="val_loss").click()
    expect(table.locator("tbody tr").first).to_contain_text(str(first + 1))
    expect(table.locator("tbody tr").first).to_contain_text("0.3")
    table.get_by_role("button", name="val_loss").click()
    expect(table.locator("tbody tr").first).to_contain_text("0.7")
    assert not shown.faults
