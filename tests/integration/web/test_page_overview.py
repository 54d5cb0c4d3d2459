"""The overview: devices, timeline, page header, and live updates."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.fakes import gated_job
from tests.fakes.queue_command import GPUYARD
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.web.conftest import Site
from tests.integration.web.page_fixture import Shown, fold_button, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module")
def packed(shown: Shown) -> tuple[int, int]:  # noqa: F811 - as above
    """Two jobs that share the first GPU."""
    first, _ = shown.holds("train", 3072, vram="8G", device="0")
    second, _ = shown.holds("eval", 2048, vram="4G", device="0")
    return first, second


@pytest.fixture
def new_visitor(shown: Shown, context: BrowserContext) -> Page:  # noqa: F811 - as above
    """The page in a browser that has no settings of it: the timeline is folded, and fits all runs when it opens."""
    return shown.site.enter(context.new_page())


@pytest.fixture
def other_programs(shown: Shown, tmp_path: Path) -> Iterator[None]:  # noqa: F811 - as above
    """On the second GPU: a program with a lease from outside the queue, and a foreign process."""
    holds = [*gated_job.COMMAND, "--vram", "1024", str(tmp_path / "never")]
    commands = [
        [*GPUYARD, "run", "--device", "1", "--vram", "2G", "--", *holds],
        ["env", "CUDA_VISIBLE_DEVICES=SIM-1", *holds],
    ]
    programs = [
        subprocess.Popen(command, env=shown.environment, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    for program in programs:
        assert program.stdout is not None
        assert "holding" in program.stdout.readline()
    yield
    for program in programs:
        program.terminate()
        program.communicate()


def test_the_header_shows_the_machine_and_the_number_of_jobs_by_state(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
) -> None:
    page = shown.at()
    expect(page.locator("#host")).not_to_be_empty()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.get_by_role("button", name="running 2")).to_be_visible()
    expect(page.get_by_role("button", name="all 2")).to_have_attribute("aria-pressed", "true")


def test_an_open_gpu_shows_the_holders_of_its_memory(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
    other_programs: None,
) -> None:
    page = shown.at()
    shown.open_devices()
    own, other = page.get_by_role("article", name="GPU 0"), page.get_by_role("article", name="GPU 1")
    expect(own.locator(".membar")).to_have_attribute(
        "aria-label", "Memory: queue, used 5 GB, queue, reserved 7 GB, free 12 GB"
    )
    expect(own).to_contain_text("5 GB of 24 GB")
    expect(own).to_contain_text("12 GB of 24 GB")
    expect(own).to_contain_text("NVLink to GPU 1 · NUMA node 0")
    expect(own).to_contain_text("80%")
    expect(own.get_by_role("link", name="train")).to_be_visible()  # until the names are known, it has the number, too
    expect(own.get_by_role("link", name=f"job {packed[0]}")).to_have_attribute("href", f"#/job/{packed[0]}")
    expect(own).to_contain_text("3 GB of 8 GB")
    expect(other.locator(".membar")).to_have_attribute(
        "aria-label", "Memory: other leases 2 GB, without a lease 1 GB, free 21 GB"
    )


def test_charts_show_the_last_minutes_and_update(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
) -> None:
    page = shown.at()
    shown.open_devices()
    page.get_by_role("article", name="Host").get_by_role("button").click()
    memory = page.get_by_role("img", name="Memory of GPU 0 over 10m: now 5 GB, peak 5 GB")
    expect(memory).to_be_visible()
    drawn = memory.locator("path.own").get_attribute("d")
    expect(memory.locator("path.own")).not_to_have_attribute("d", drawn or "")
    expect(page.get_by_role("img", name="Utilisation of GPU 0 over 10m: now 80%, peak 80%")).to_be_visible()
    expect(page.get_by_role("img", name="CPU over 10m: now")).to_be_visible()
    page.get_by_role("group", name="Time range of the charts").get_by_role("button", name="1h").click()
    expect(page.get_by_role("img", name="Memory of GPU 0 over 1h")).to_be_visible()


def test_the_timeline_shows_packed_jobs_side_by_side_with_tooltips(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
) -> None:
    page = shown.at()
    shown.open_timeline()
    first, second = (page.locator(f'.stretch[data-job="{job_id}"]') for job_id in packed)
    expect(first).to_be_visible()
    expect(second).to_be_visible()
    boxes = [each.locator(".body").bounding_box() for each in (first, second)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert min(boxes[0]["y"], boxes[1]["y"]) + boxes[0]["height"] <= max(boxes[0]["y"], boxes[1]["y"])
    page.get_by_role("group", name="Time range of the timeline").get_by_role("button", name="10m").click()
    first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text(f"train · job {packed[0]}")
    expect(page.get_by_role("tooltip")).to_contain_text("now, ")
    second.focus()
    expect(page.get_by_role("tooltip")).to_contain_text(f"eval · job {packed[1]}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"eval · job {packed[1]}")).to_be_visible()


def test_a_timeline_that_opens_shows_all_runs_even_if_its_answer_is_late(
    new_visitor: Page,
    packed: tuple[int, int],
) -> None:
    page, held = new_visitor, list[Route]()
    page.route("**/v1/timeline?span=10m", _answer_without_runs)
    page.route("**/v1/timeline?span=24h", lambda route: held.append(route))  # noqa: PLW0108 - no builtin is accepted
    with page.expect_response("**/v1/timeline?span=10m"):
        page.reload()
    with page.expect_request("**/v1/timeline?span=24h"):
        fold_button(page).click()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is laid out
    held[0].continue_()
    for job_id in packed:
        expect(page.locator(f'.stretch[data-job="{job_id}"]')).to_be_visible()


def test_a_timeline_that_opens_again_soon_shows_a_job_that_started_meanwhile(
    new_visitor: Page,
    shown: Shown,  # noqa: F811
) -> None:
    with new_visitor.expect_response("**/v1/timeline?span=24h"):  # the daemon keeps this answer for a minute
        fold_button(new_visitor).click()
    fold_button(new_visitor).click()
    job, gate = shown.holds("later", 1024, vram="2G", device="1")
    fold_button(new_visitor).click()
    expect(new_visitor.locator(f'.stretch[data-job="{job}"]')).to_be_visible()
    gate.touch()
    shown.queue.wait(job)


def _answer_without_runs(route: Route) -> None:
    response = route.fetch()
    route.fulfill(response=response, json={**response.json(), "stretches": []})


@pytest.mark.full
def test_the_suspended_time_of_a_job_is_hatched(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
) -> None:
    page = shown.at()
    shown.open_timeline()
    shown.queue.post("/jobs/suspend", ids=str(packed[1]))
    shown.queue.until_state(packed[1], "suspended")
    stretch = page.locator(f'.stretch[data-job="{packed[1]}"]')
    expect(stretch.locator(".suspended")).to_have_count(1)
    expect(stretch).to_have_attribute("data-tone", "parked")
    shown.queue.post("/jobs/resume", ids=str(packed[1]))
    expect(stretch).to_have_attribute("data-tone", "live")
    expect(stretch.locator(".suspended")).to_have_count(1)


def test_a_paused_queue_is_shown_and_can_be_unpaused(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    shown.queue.post("/pause")
    expect(page.get_by_text("The queue is paused: no new jobs start.")).to_be_visible()
    shown.button("Unpause").click()
    expect(page.get_by_text("The queue is paused: no new jobs start.")).to_be_hidden()
    assert shown.queue.get("/status")["paused"] is False


def test_the_colour_scheme_follows_the_system_until_the_user_sets_it(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    light = _ground(page)
    page.emulate_media(color_scheme="dark")
    dark = _ground(page)
    assert light != dark
    page.get_by_role("button", name="Switch to light").click()
    assert _ground(page) == light
    page.reload()
    expect(page.get_by_role("button", name="Switch to dark")).to_be_visible()
    assert _ground(page) == light
    page.get_by_role("button", name="Switch to dark").click()
    page.emulate_media(color_scheme="light")
    assert _ground(page) == dark


def _ground(page: Page) -> object:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_a_hidden_page_closes_its_stream(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    expect(page.locator("#connection")).to_have_text("live")
    show = "(is) => { Object.defineProperty(document, 'hidden', {configurable: true, get: () => is}); \
        document.dispatchEvent(new Event('visibilitychange')) }"
    opened: list[str] = []
    page.on("request", lambda request: opened.append(request.url))
    with page.expect_event("requestfailed", lambda request: "/v1/events" in request.url):
        page.evaluate(show, True)
    with page.expect_request(lambda request: "/v1/events" in request.url):
        page.evaluate(show, False)
    assert len([url for url in opened if "/v1/events" in url]) == 1
    held = shown.queue.shell("true", hold=True, gpus=0)
    expect(shown.row(held)).to_contain_text("held")


def test_every_control_has_a_name_and_every_view_its_landmarks(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
) -> None:
    nameless = """[...document.querySelectorAll("button, a[href], input, textarea, svg[role], [role=img]")]
        .filter((node) => node.checkVisibility() && !(node.getAttribute("aria-label") || node.textContent.trim()
            || node.labels?.[0]?.textContent.trim()))
        .map((node) => node.outerHTML)"""
    for route, heading in (("/", "GPUs"), (f"/job/{packed[0]}", "train"), ("/submit", "Submit a job")):
        page = shown.at(route)
        expect(page.get_by_role("heading", name=heading).first).to_be_visible()
        for landmark in ("banner", "main", "navigation"):
            expect(page.get_by_role(landmark)).to_have_count(1)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        assert page.evaluate(nameless) == []
    page = shown.at()
    for name in ("GPUs", "Timeline", "Queue"):
        expect(page.get_by_role("region", name=name)).to_be_visible()
    expect(page.get_by_role("table", name="Queue").get_by_role("columnheader")).to_have_count(9)


def test_tab_moves_a_visible_focus_from_the_top_of_the_page(shown: Shown) -> None:  # noqa: F811
    page = shown.at()
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    focused = []
    for _ in range(4):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.textContent.trim()"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert focused == ["Skip to the content", "gpuyard", "Overview", "Submit"]


@pytest.mark.parametrize("width", [360, 640])  # a phone, and a window of 1280 at a zoom of 200%
def test_nothing_is_wider_than_a_narrow_window(
    shown: Shown,  # noqa: F811
    packed: tuple[int, int],
    width: int,
) -> None:
    shown.page.set_viewport_size({"width": width, "height": 740})
    for route in ("/", f"/job/{packed[0]}", "/submit"):
        page = shown.at(route)
        expect(page.locator("main h2:visible").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown.page.set_viewport_size({"width": 1280, "height": 900})


def test_the_page_reconnects_to_a_restarted_daemon(
    shown: Shown,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in shown.environment.items():
        monkeypatch.setenv(name, value)
    page = shown.at()
    expect(page.locator("#connection")).to_have_text("live")
    shown.queue.kill9()
    expect(page.locator("#connection")).to_have_text("reconnecting")
    shown.queue.start()
    shown.queue.post("/web", port=shown.site.port)
    expect(page.locator("#connection")).to_have_text("live")
    held = shown.queue.shell("true", hold=True, gpus=0)
    expect(shown.row(held)).to_be_visible()


@pytest.mark.full
def test_a_read_only_page_has_no_actions(queue: QueueUnderTest, page: Page) -> None:
    held = queue.shell("true", hold=True, gpus=0)
    queue.post("/pause")
    site = Site(queue, read_only=True)
    site.enter(page)
    expect(page.get_by_text("The queue is paused: no new jobs start.")).to_be_visible()
    expect(page.locator("#jobs-body tr")).to_have_count(1)
    for route in ("/", "/submit", f"/job/{held}"):
        page.goto(f"{site.origin}/#{route}")
        expect(page.locator("main h2:visible").first).to_be_visible()
        for name in ("Unpause", "Cancel", "Submit again…", "Release", "Submit"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        expect(page.get_by_role("checkbox")).to_have_count(0)
        expect(page.get_by_role("link", name="Submit")).to_have_count(0)
