"""The layout of the page: what is above the fold, what opens, the order on a phone, targets for fingers."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect

from tests.integration.web.page_fixture import Shown, show, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]

PHONE: ViewportSize = {"width": 390, "height": 844}
# Controls below 40 by 40 px: links within text, as in a log or a fact, are no controls of their own.
SMALL = """() => [...document.querySelectorAll(
        "button, select, .places a, a.back, .chip, .pickbox, input:not([type=checkbox])"
    )]
    .filter((node) => node.checkVisibility())
    .map((node) => [node, node.getBoundingClientRect()])
    .filter(([node, box]) => box.height < 40 || (box.width < 40 && !node.matches(".sort")))
    .map(([node, box]) => `${node.outerHTML.slice(0, 90)}: ${box.width} x ${box.height}`)"""


def _top(node: Locator) -> float:
    box = node.bounding_box()
    assert box is not None
    return box["y"]


@pytest.fixture(scope="module", params=[1, 16])
def machine(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shown, int]]:
    """A page of a machine with one GPU, and with sixteen."""
    home = tmp_path_factory.mktemp(f"machine{request.param}") / "home"
    with show(browser, home, f"{request.param}x80GB") as shown:  # noqa: F811 - as above
        for number in range(30):
            shown.queue.submit("true", hold=True, name=f"morning{number}", gpus=0)
        yield shown, request.param


def test_the_queue_is_above_the_fold_with_one_gpu_and_with_sixteen(machine: tuple[Shown, int]) -> None:
    shown, gpus = machine  # noqa: F811
    page = shown.at()
    expect(page.get_by_role("article").filter(has_text="80 GB")).to_have_count(gpus)
    rows = page.locator("#jobs-body tr")
    expect(rows).to_have_count(30)
    lines = page.get_by_role("article").filter(has_text="80 GB")
    assert max(lines.nth(place).bounding_box()["height"] for place in range(gpus)) < 40  # type: ignore[index]
    visible = sum(_top(rows.nth(place)) + 30 < 900 for place in range(30))
    assert visible >= (8 if gpus == 1 else 6)


def test_on_a_phone_the_queue_comes_first(machine: tuple[Shown, int]) -> None:
    shown, gpus = machine  # noqa: F811
    shown.page.set_viewport_size(PHONE)
    page = shown.at()
    first = page.locator("#jobs-body tr").first
    expect(first).to_be_visible()
    assert _top(first) < 300
    order = "[...document.querySelectorAll('#view-overview > section')].map((node) => node.id)"
    assert page.evaluate(order) == ["queue", "devices", "timeline-section"]
    page.get_by_role("button", name=f"{gpus} GPU").click()
    expect(page.get_by_role("article", name="GPU 0")).to_be_in_viewport()
    shown.page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_function(f"{order}.join() === 'devices,timeline-section,queue'")


def test_the_line_of_a_gpu_opens_by_click_and_by_key_and_stays_open(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    gpu = page.get_by_role("article", name="GPU 0")
    button = gpu.get_by_role("button", name="GPU 0")
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(gpu.get_by_text("Temperature")).to_be_hidden()
    expect(page.get_by_role("group", name="Time range of the charts")).to_be_hidden()
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(gpu.get_by_text("Temperature")).to_be_visible()
    page.reload()
    expect(gpu.get_by_text("Temperature")).to_be_visible()
    gpu.locator(".membar").click()
    expect(gpu.get_by_text("Temperature")).to_be_hidden()
    page.locator("body").press("g")
    expect(page.get_by_role("article", name="GPU 1").get_by_text("Temperature")).to_be_visible()
    page.locator("body").press("g")
    expect(gpu.get_by_text("Temperature")).to_be_hidden()


def test_charts_have_axes_with_units_and_times(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    shown.open_devices()
    memory, load = (page.get_by_role("article", name="GPU 0").locator(".axes").nth(place) for place in (0, 1))
    expect(memory.locator(".values span")).to_have_text(["24 GB", "12 GB", "0"])
    expect(load.locator(".values span")).to_have_text(["100%", "50%", "0"])
    for axis in (memory, load):
        texts = axis.locator(".times span").all_inner_texts()
        assert len(texts) == 3
        assert all(len(text) == 5 and text[2] == ":" for text in texts)
    page.locator("#open-devices").click()


def test_the_timeline_is_folded_and_fitted_to_its_runs(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("true", gpus=0, name="short")
    shown.queue.wait(job)
    page = shown.at()
    drawing = page.get_by_role("group", name="Jobs by device over time")
    expect(drawing).to_be_hidden()
    page.locator("body").press("t")
    expect(drawing).to_be_visible()
    expect(shown.button("fit")).to_have_attribute("aria-pressed", "true")
    bar = page.locator(f'.stretch[data-job="{job}"] .body')
    expect(bar).to_be_visible()
    # The only run ended: a range up to now would move it to the left as time passes.
    box, whole = bar.bounding_box(), drawing.bounding_box()
    assert box is not None
    assert whole is not None
    assert box["x"] + box["width"] > whole["x"] + 0.9 * whole["width"]
    page.locator("body").press("t")
    expect(drawing).to_be_hidden()


def _phone(browser: Browser, shown: Shown) -> Page:  # noqa: F811
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    return shown.site.enter(context.new_page())


def test_controls_are_large_enough_for_a_finger(browser: Browser, shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("true", gpus=0, hold=True, name="touched")
    page = _phone(browser, shown)
    for route in ("/?search=touched", f"/job/{job}", "/submit"):
        page.goto(f"{shown.site.origin}/#{route}")
        expect(page.locator("main h2:visible").first).to_be_visible()
        if "search" in route:
            page.get_by_role("checkbox", name=f"Select job {job}", exact=True).check()
            page.locator("#open-devices").click()
        assert page.evaluate(SMALL) == [], route
    page.goto(f"{shown.site.origin}/#/?search=touched")
    page.get_by_role("button", name="Clear", exact=True).tap()
    expect(page.get_by_role("toolbar", name="Actions on the selected jobs")).to_be_hidden()
    state = page.locator("#jobs-body tr").filter(has_text="touched").locator("td.is")
    state.scroll_into_view_if_needed()
    box = state.bounding_box()
    assert box is not None
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.get_by_role("heading", name=f"touched · job {job}")).to_be_visible()
    page.context.close()
