"""The queue on the page: search, filter, paging, changes, and keyboard control."""

import pytest
from playwright.sync_api import Page, expect

from tests.integration.queue_fixture import until
from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]

MANY = 3000


@pytest.fixture(scope="module")
def many(shown: Shown) -> int:  # noqa: F811 - as above
    """Submit a large array of held jobs, and return the id of the first."""
    return shown.queue.submit("echo", "part-{index}", array=f"0-{MANY - 1}", name="many", hold=True, gpus=0)


def _total(page: Page, text: str) -> None:
    expect(page.locator("#queue-total")).to_have_text(text)


@pytest.mark.full
def test_the_queue_is_paged(shown: Shown, many: int) -> None:  # noqa: F811
    page = shown.at("/?state=held")
    _total(page, f"{MANY:,} jobs that match")
    expect(page.locator("#jobs-body tr")).to_have_count(50)
    expect(shown.row(many)).to_be_visible()
    expect(shown.button("Previous")).to_be_disabled()
    shown.button("Next").click()
    expect(page.locator("#pages")).to_contain_text("51–100 of 3,000")  # noqa: RUF001 - a dash is between figures
    expect(shown.row(many + 50)).to_be_visible()
    shown.button("Previous").click()
    expect(shown.row(many)).to_be_visible()
    shown.at("/?state=held&after=2950")
    expect(shown.row(many + MANY - 1)).to_be_visible()
    expect(shown.button("Next")).to_be_disabled()
    shown.button("First").click()
    expect(shown.row(many)).to_be_visible()


@pytest.mark.full
def test_search_covers_all_jobs(shown: Shown, many: int) -> None:  # noqa: F811
    page = shown.at("/")
    page.get_by_role("searchbox").fill("part-2718")
    _total(page, "1 job that matches")
    expect(shown.row(many + 2718)).to_contain_text("echo part-2718")
    page.get_by_role("searchbox").fill("no such thing")
    expect(page.get_by_text("No jobs match.")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    expect(page.locator("#jobs-body a.fold")).to_be_visible()


def test_a_state_in_the_header_filters_the_queue(shown: Shown, many: int) -> None:  # noqa: F811
    done = shown.queue.shell("true", gpus=0, name="done")
    shown.queue.wait(done)
    page = shown.at("/")
    chip = page.get_by_role("button", name="succeeded")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    expect(shown.row(done)).to_contain_text("succeeded")
    expect(shown.row(many)).to_have_count(0)
    page.reload()
    expect(shown.row(done)).to_be_visible()
    expect(shown.row(many)).to_have_count(0)


def test_rows_are_updated_in_place(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.shell("true", gpus=0, name="stays", hold=True)
    page = shown.at("/?search=stays")
    shown.row(job).evaluate("(row) => { row.mark = 'the same' }")
    shown.queue.post("/jobs/release", ids=str(job))
    expect(shown.row(job)).to_contain_text("succeeded")
    assert shown.row(job).evaluate("(row) => row.mark") == "the same"
    assert page.evaluate("document.querySelectorAll('#jobs-body tr').length") == 1


def test_a_shortened_command_keeps_its_spaces(shown: Shown) -> None:  # noqa: F811
    # The end that is always shown has 22 characters: the space before it is the last character of what precedes.
    words = ("echo", "sim-job", "now", "--vram", "11G", "--seconds", "40", "--load", "40")
    job = shown.queue.submit(*words, gpus=0, hold=True, name="spaced")
    shown.at("/?search=spaced")
    first, last = (shown.row(job).locator("code > span").nth(place) for place in (0, 1))
    expect(last).to_have_text("--seconds 40 --load 40")
    # The width of the text up to the end of its last letter that is no space.
    letters = """(node) => {
      const range = document.createRange();
      range.setStart(node.firstChild, 0);
      range.setEnd(node.firstChild, node.textContent.trimEnd().length);
      return range.getBoundingClientRect().right;
    }"""
    box = last.bounding_box()
    assert box is not None
    assert box["x"] - first.evaluate(letters) > 4
    shown.queue.post("/jobs/cancel", ids=str(job))


def test_elapsed_times_keep_counting(shown: Shown) -> None:  # noqa: F811
    job, gate = shown.queue.start_gated("ticks", gpus=0, tag="ticks")
    shown.at("/?search=ticks")
    for seconds in (2, 3):
        expect(shown.row(job).get_by_text(f"{seconds}s", exact=True)).to_be_visible()
    gate.write_text("go\n")


def test_selected_jobs_can_be_held_released_and_reprioritized(shown: Shown) -> None:  # noqa: F811
    shown.queue.post("/pause")
    first = shown.queue.submit("true", array="0-3", gpus=0, name="bulk")
    page = shown.at("/?search=bulk")
    for job in (first, first + 2):
        page.get_by_role("checkbox", name=f"Select job {job}").check()
    expect(page.get_by_role("toolbar")).to_contain_text("2 jobs selected")
    shown.button("Hold").click()
    expect(page.get_by_text("2 jobs held")).to_be_visible()
    for job, state in enumerate(("held", "queued", "held", "queued"), first):
        expect(shown.row(job)).to_contain_text(state)
    page.get_by_role("checkbox", name="Select all jobs on this page").check()
    expect(page.get_by_role("toolbar")).to_contain_text("4 jobs selected")
    expect(shown.button("Retry")).to_be_hidden()
    shown.button("Release 2").click()
    expect(page.get_by_text("2 jobs released")).to_be_visible()
    page.get_by_role("checkbox", name=f"Select job {first + 1}", exact=True).check()
    shown.button("Priority…").click()
    page.get_by_role("dialog").get_by_label("Priority").fill("42")
    shown.button("Change").click()
    until(lambda: shown.queue.job(first + 1)["priority"] == 42, "its priority")
    shown.queue.post("/jobs/cancel", ids=f"{first}-{first + 3}")
    shown.queue.post("/unpause")


def test_all_matching_jobs_are_cancelled_after_a_confirmation(shown: Shown, many: int) -> None:  # noqa: F811
    page = shown.at("/?state=held&search=part-17")
    _total(page, "111 jobs that match")
    page.get_by_role("checkbox", name="Select all jobs on this page").check()
    expect(page.get_by_role("toolbar")).to_contain_text("50 jobs selected")
    shown.button("Select all 111 that match").click()
    shown.button("Cancel").click()
    shown.button("Keep as it is").click()
    assert shown.queue.counts()["held"] == MANY
    shown.button("Cancel").click()
    shown.button("Cancel 111").click()
    expect(page.get_by_text("111 jobs cancelled")).to_be_visible()
    assert shown.queue.counts()["held"] == MANY - 111
    assert shown.queue.state(many + 1799) == "cancelled"
    assert shown.queue.state(many + 1800) == "held"


def test_names_and_commands_with_html_are_shown_as_text(shown: Shown) -> None:  # noqa: F811
    name, line = "<script>alert(1)</script>", "<img src=x onerror=alert(2)>"
    job = shown.queue.submit("echo", line, name=name, tag="<b>bold</b>", gpus=0)
    shown.queue.wait(job)
    for route in ("/?search=script", f"/job/{job}"):
        page = shown.at(route)
        expect(page.get_by_text(name).filter(visible=True).first).to_be_visible()
        expect(page.get_by_text(line).filter(visible=True).first).to_be_visible()
        assert page.locator("main script, main img, main b").count() == 0
    expect(page.get_by_role("log")).to_have_text(line)


def test_the_keyboard_alone_finds_selects_and_opens_a_job(shown: Shown) -> None:  # noqa: F811
    first = shown.queue.submit("true", array="0-2", gpus=0, name="keyed", hold=True)
    page = shown.at("/")
    expect(page.locator("#jobs-body tr")).not_to_have_count(0)
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("keyed")
    expect(page.locator("#jobs-body tr")).to_have_count(3)
    for key in ("Enter", "j", "ArrowDown", "k"):
        page.keyboard.press(key)
    expect(shown.row(first + 1).get_by_role("link")).to_be_focused()
    page.keyboard.press("x")
    expect(page.get_by_role("toolbar")).to_contain_text("1 job selected")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"keyed · job {first + 1}")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("search the queue")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="Queue")).to_be_visible()


def test_escape_twice_closes_a_dialog_and_goes_back_to_the_queue(shown: Shown) -> None:  # noqa: F811
    """The second key comes before the browser has left the entry of the dialog in its history."""
    page = shown.at(f"/job/{shown.queue.submit('true', gpus=0, hold=True)}")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.evaluate("""() => {
        const [dialog, escape] = [document.querySelector("dialog"), {key: "Escape", bubbles: true}];
        dialog.addEventListener("close", () => document.body.dispatchEvent(new KeyboardEvent("keydown", escape)));
        dialog.close();
    }""")
    expect(page.locator("dialog")).to_have_count(0)
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
    expect(page.get_by_role("region", name="Queue")).to_be_visible()
