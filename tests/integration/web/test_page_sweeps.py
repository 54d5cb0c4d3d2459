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
    expect(page.locator("dialog[open]")).to_contain_text(f"{first}-{first + 23} s (23 jobs)")
    page.locator("dialog[open]").get_by_role("button", name="Cancel 23").click()
    shown.queue.until_state(first, "cancelled")
    assert shown.queue.get("/jobs", ids=str(apart))["jobs"][0]["state"] == "held"
    expect(page.locator("#bulk")).to_be_hidden()
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
    expect(bulk).to_be_hidden()
    page.get_by_label(f"Select job {first}-{first + 2}").check()
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


def test_a_sweep_has_an_address_that_survives_a_reload_and_back(shown: Shown) -> None:  # noqa: F811
    options = {"gpus": 0, "hold": True}
    first = shown.queue.submit("echo", "{lr}", sweep=["lr=1..30"], name="linked", tag="night", **options)
    page = shown.at("/")
    row = page.locator("#jobs-body > tr", has_text="linked")
    expect(row.get_by_role("button")).to_have_attribute("href", f"#/sweep/{first}")
    row.get_by_role("button").click()
    page.locator(f'tr.runs a[href="#/sweep/{first}"]').click()
    heading = page.get_by_role("heading", name=f"linked · jobs {first}-{first + 29}")
    expect(heading).to_be_visible()
    expect(page.locator("#view-job")).to_contain_text("0/30 done, 30 held")
    expect(page.locator("#view-job .command")).to_have_text("echo {lr}")
    runs = page.locator("#view-job tbody tr")
    expect(runs).to_have_count(20)
    page.get_by_role("button", name="lr").click()
    page.get_by_role("button", name="lr").click()
    expect(runs.first).to_contain_text(str(first + 29))
    page.get_by_role("button", name="Next").click()
    expect(runs).to_have_count(10)
    page.reload()
    expect(heading).to_be_visible()
    expect(runs).to_have_count(10)
    expect(runs.last).to_contain_text(str(first))
    expect(page.get_by_role("columnheader", name="lr")).to_have_attribute("aria-sort", "descending")
    runs.last.get_by_role("link").click()
    expect(page.get_by_role("heading", name=f"linked · job {first}")).to_be_visible()
    expect(page.get_by_role("region", name="Facts").get_by_role("link", name=f"{first}")).to_have_attribute(
        "href", f"#/sweep/{first}"
    )
    page.go_back()
    expect(heading).to_be_visible()
    expect(runs).to_have_count(10)
    page.go_back()
    expect(page.get_by_role("region", name="Queue")).to_be_visible()


def test_the_page_of_a_sweep_acts_on_its_runs(shown: Shown) -> None:  # noqa: F811
    first = shown.queue.submit("true", array="0-3", name="acted", gpus=0, hold=True)
    shown.queue.post("/jobs/cancel", ids=str(first))
    page = shown.at(f"/sweep/{first + 2}")
    toolbar = page.get_by_role("toolbar", name="Actions on these jobs").get_by_role("button")
    expect(toolbar).to_have_text(["Cancel 3", "Release 3", "Retry 1", "Priority 3…"])
    toolbar.get_by_text("Cancel 3").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"{first}-{first + 3} acted (3 jobs)")
    page.get_by_role("dialog").get_by_role("button", name="Cancel 3").click()
    expect(toolbar).to_have_text(["Retry"])
    assert {shown.queue.state(first + at) for at in range(4)} == {"cancelled"}
    shown.at("/sweep/999999")
    expect(page.get_by_text("job 999999 is not part of a sweep or an array")).to_be_visible()
    assert not shown.faults


def test_long_ids_and_their_ranges_are_on_one_line(shown: Shown) -> None:  # noqa: F811
    shown.queue.submit("true", array="0-9999", gpus=0, hold=True, name="thousands")
    first = shown.queue.submit("echo", "{lr}", sweep=["lr=1,2,3"], name="later", gpus=0, hold=True)
    assert first > 10_000
    alone = shown.queue.submit("true", gpus=0, hold=True, name="last")
    page = shown.at("/")
    ids = page.locator("#jobs-body > tr > td.id")
    expect(ids.filter(has_text=f"{first}-{first + 2}")).to_be_visible()
    expect(ids.get_by_text(str(alone), exact=True)).to_be_visible()
    broken = """(cells) => cells.filter((cell) => {
      const text = cell.firstChild;
      const isInside = text.getBoundingClientRect().right <= cell.getBoundingClientRect().right;
      return text.getClientRects().length > 1 || !isInside;
    }).map((cell) => cell.textContent)"""
    for width in (1280, 900, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert ids.evaluate_all(broken) == [], width
    page.set_viewport_size({"width": 1280, "height": 900})
