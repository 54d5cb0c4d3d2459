"""Sorting, selecting and acting in the queue, and dialogs that Back closes."""

import pytest
from playwright.sync_api import Page, expect

from gpuyard.model.lifecycle import JobState
from gpuyard.ui.tui.job_actions import APPLIES
from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]

MAY = """async ([verb, state]) => (await import('/static/states.js')).ACTS[verb].may(state)"""


def _ids(page: Page) -> list[int]:
    return [int(text) for text in page.locator("#jobs-body td.id").all_inner_texts()]


def _sorts(page: Page, ids: list[int]) -> None:
    expect(page.locator("#jobs-body td.id")).to_have_text([str(job_id) for job_id in ids])


def test_a_click_on_a_heading_sorts_the_whole_queue(shown: Shown) -> None:  # noqa: F811
    low, high, middle = (
        shown.queue.submit("true", gpus=0, hold=True, tag="sorted", priority=priority, name=name)
        for priority, name in ((-5, "beta"), (7, "alpha"), (1, "gamma"))
    )
    page = shown.at("/?search=sorted")
    _sorts(page, [low, high, middle])
    heading = page.get_by_role("columnheader", name="Priority")
    heading.get_by_role("button").click()
    _sorts(page, [high, middle, low])
    expect(heading).to_have_attribute("aria-sort", "descending")
    page.reload()
    _sorts(page, [high, middle, low])
    heading.get_by_role("button").click()
    _sorts(page, [low, middle, high])
    expect(heading).to_have_attribute("aria-sort", "ascending")
    heading.get_by_role("button").click()
    _sorts(page, [low, high, middle])
    assert heading.get_attribute("aria-sort") is None
    page.get_by_role("columnheader", name="Name").get_by_role("button").press("Enter")
    _sorts(page, [high, low, middle])
    shown.page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_label("Sort by").select_option("Job ↓")
    _sorts(page, [middle, high, low])
    shown.page.set_viewport_size({"width": 1280, "height": 900})


def test_only_actions_that_apply_to_the_selected_jobs_are_offered(shown: Shown) -> None:  # noqa: F811
    held = shown.queue.submit("true", gpus=0, hold=True, tag="offered")
    failed = shown.queue.shell("exit 3", gpus=0, tag="offered")
    shown.queue.wait(failed)
    page = shown.at("/?search=offered")
    toolbar = page.get_by_role("toolbar").get_by_role("button")
    pick = page.get_by_role("checkbox", name=f"Select job {failed}", exact=True)
    pick.check()
    expect(toolbar.filter(visible=True)).to_have_text(["Retry", "Clear"])
    page.get_by_role("checkbox", name=f"Select job {held}", exact=True).check()
    expect(toolbar.filter(visible=True)).to_have_text(["Cancel 1", "Release 1", "Retry 1", "Priority 1…", "Clear"])
    shown.button("Release 1").click()
    expect(page.get_by_text(f"Job {held} released")).to_be_visible()
    expect(shown.row(held)).to_contain_text("succeeded")
    expect(toolbar.filter(visible=True)).to_have_count(0)


def test_a_selection_ends_with_an_action(shown: Shown) -> None:  # noqa: F811
    first = shown.queue.submit("false", array="0-2", gpus=0, tag="ended")
    shown.queue.wait(f"{first}-{first + 2}")
    shown.queue.post("/pause")
    page = shown.at("/?state=failed&search=ended")
    for job in (first, first + 1):
        page.get_by_role("checkbox", name=f"Select job {job}", exact=True).check()
    shown.button("Retry").click()
    expect(page.get_by_text("2 jobs queued again")).to_be_visible()
    expect(page.locator("#bulk")).to_be_hidden()
    shown.queue.post("/unpause")


def test_a_selected_job_that_leaves_the_list_is_not_selected_any_more(shown: Shown) -> None:  # noqa: F811
    first = shown.queue.submit("false", array="0-2", gpus=0, tag="left")
    shown.queue.wait(f"{first}-{first + 2}")
    shown.queue.post("/pause")
    page = shown.at("/?state=failed&search=left")
    page.get_by_role("checkbox", name="Select all jobs on this page").check()
    toolbar = page.get_by_role("toolbar", name="Actions on the selected jobs")
    expect(toolbar).to_contain_text("3 jobs selected")
    shown.queue.post("/jobs/retry", ids=f"{first}-{first + 1}")
    expect(toolbar).to_contain_text("1 job selected")
    shown.queue.post("/jobs/retry", ids=str(first + 2))
    expect(toolbar).to_be_hidden()
    shown.queue.post("/unpause")


def test_a_confirmation_names_the_jobs(shown: Shown) -> None:  # noqa: F811
    long = "a-name-that-is-much-longer-than-the-dialog-is-wide-with-its-number-at-the-end-{}"
    jobs = [shown.queue.submit("true", gpus=0, hold=True, tag="asked", name=long.format(at)) for at in range(8)]
    page = shown.at("/?search=asked")
    page.get_by_role("checkbox", name="Select all jobs on this page").check()
    shown.button("Cancel").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("Cancel 8 jobs?")
    expected = [f"{job} {long.format(at)}" for at, job in enumerate(jobs[:6])]
    expect(dialog.get_by_role("listitem")).to_have_text([*expected, "and 2 more"])
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert dialog.evaluate("(node) => node.scrollWidth <= node.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 900})
    shown.button("Keep as it is").click()
    expect(page.get_by_role("toolbar")).to_contain_text("8 jobs selected")


def test_back_closes_a_dialog_and_stays_on_the_page(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("echo", "once", gpus=0, name="dialogs", hold=True)
    shown.at("/?search=dialogs")
    page = shown.at(f"/job/{job}")
    dialog = page.get_by_role("dialog")
    for opener in ("Submit again…", "Priority…"):
        shown.button(opener).click()
        expect(dialog).to_be_visible()
        page.go_back()
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("heading", name=f"dialogs · job {job}")).to_be_visible()
    assert shown.queue.job(job)["priority"] == 0
    shown.button("Priority…").click()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    shown.button("Priority…").click()
    dialog.get_by_label("Priority").fill("3")
    shown.button("Change").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("region", name="Facts")).to_contain_text("3")
    # A closed dialog leaves no entry behind: Back leaves the job.
    page.go_back()
    expect(page.get_by_role("region", name="Queue")).to_be_visible()
    expect(shown.row(job)).to_be_visible()


def test_the_page_and_top_offer_the_same_actions_in_each_state(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    for verb, states in APPLIES.items():
        offered = {state for state in JobState if page.evaluate(MAY, [verb, str(state)])}
        assert offered == {JobState(state) for state in states}, verb
