"""A real browser, and the web page of a queue of its own."""

import contextlib
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.integration.queue_fixture import QueueUnderTest

expect.set_options(timeout=20_000)


class Site:
    """The page of a queue: `url` has the token, `origin` is its scheme, host and port."""

    def __init__(self, queue: QueueUnderTest, **settings: object) -> None:
        self.queue = queue
        self.url: str = queue.post("/web", **{"port": 0, **settings})["url"]
        self.origin = self.url.partition("/?")[0]
        self.token = self.url.partition("token=")[2]
        self.port = urlsplit(self.url).port

    def enter(self, page: Page) -> Page:
        """Open the link that `gpuyard web` prints, and wait until the page listens to clicks and keys."""
        page.goto(self.url)
        page.wait_for_url(f"{self.origin}/")
        expect(page.locator("#host")).not_to_be_empty()
        return page


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. While it is open, other tests cannot run an event loop."""
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A new browser profile without cookies."""
    context = browser.new_context()
    context.set_default_timeout(30_000)
    yield context
    context.close()


@pytest.fixture
def site(queue: QueueUnderTest) -> Site:
    return Site(queue)


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Page:
    """The page, opened with its token."""
    return site.enter(context.new_page())
