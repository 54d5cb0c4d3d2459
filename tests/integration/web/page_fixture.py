"""One daemon and one browser window per test module; each test opens its own route of the page."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect

from tests.fakes import gated_job
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.web.conftest import Site

SIMULATED = "2x24GB:links=0-1:nodes=0,1"


class Shown:
    """A queue and its page in a browser window."""

    def __init__(self, queue: QueueUnderTest, context: BrowserContext) -> None:
        self.queue = queue
        self.site = Site(queue)
        self.context = context
        self.faults: list[str] = []
        self.page = self.window()

    def window(self) -> Page:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._heard)
        return self.site.enter(page)

    def _heard(self, message: ConsoleMessage) -> None:
        """Collect console errors, except those of failed requests, which the browser logs by itself."""
        if "Content Security Policy" in message.text:
            self.faults.append(message.text)

    def at(self, route: str = "/") -> Page:
        self.page.goto(f"{self.site.origin}/#{route}")
        return self.page

    def holds(self, name: str, memory_mb: int, **options: Any) -> tuple[int, Path]:
        """Start a job and wait until it holds its memory. Return its id and the file that ends it."""
        gate = self.queue.home.parent / f"{name}.gate"
        command = (*gated_job.COMMAND, "--vram", str(memory_mb), "--load", "40", str(gate))
        job_id = self.queue.submit(*command, name=name, environment=self.environment, **options)
        self.queue.until_state(job_id, "running")
        return job_id, gate

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "GPUYARD_HOME": str(self.queue.home), "GPUYARD_SIMULATE": SIMULATED}

    def open_devices(self) -> None:
        """Open all GPUs, unless they are open."""
        button = self.page.locator("#open-devices")
        expect(self.page.get_by_role("article", name="GPU 0")).to_be_visible()
        if button.inner_text() == "Open all":
            button.click()

    def open_timeline(self) -> None:
        if fold_button(self.page).get_attribute("aria-expanded") == "false":
            fold_button(self.page).click()

    # Elements of the page

    def row(self, job_id: int) -> Locator:
        return self.page.locator("#jobs-body tr").filter(has=self.page.locator(f'a[href="#/job/{job_id}"]'))

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)


def fold_button(page: Page) -> Locator:
    """The button that opens and folds the timeline."""
    return page.get_by_role("button", name="Timeline", exact=True)


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with show(browser, tmp_path_factory.mktemp("page") / "home", SIMULATED) as shown:
        yield shown


@contextmanager
def show(browser: Browser, home: Path, simulated: str) -> Iterator[Shown]:
    """Start a queue with these GPUs, and open its page in a window of 1280 by 900."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUYARD_HOME", str(home))
        patch.setenv("GPUYARD_SIMULATE", simulated)
        queue = QueueUnderTest(home)
        queue.start()
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(20_000)
        shown = Shown(queue, context)
        yield shown
        context.close()
        queue.close()
        assert shown.faults == []
