"""Attacks with text that the victim's web page shows: escapes, marks of direction, line ends, markup, scripts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.hostile.catalogue import attack
from tests.hostile.hostile_texts import NASTY, make_hostile_texts, make_own_home  # noqa: F401 - fixtures are found where they are named
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.web.conftest import Site, chromium

pytestmark = pytest.mark.needs("chromium")

MARKUP = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
# All texts of the page: of elements, of attributes, and its title.
TEXTS = """() => {
  const found = [document.title];
  const walker = document.createTreeWalker(document, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) found.push(node.data);
    else for (const attribute of node.attributes) found.push(attribute.value);
  }
  return found;
}"""
UNPRINTABLE = ("\x1b", "\x07", "\x9b", "\u202e")


@pytest.fixture
def window(queue: QueueUnderTest) -> Iterator[Page]:
    """The page of the victim's queue, in a new browser: other tests of this package run an event loop."""
    with chromium() as browser:
        context: BrowserContext = browser.new_context()
        context.set_default_timeout(30_000)
        faults: list[str] = []
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        yield Site(queue).enter(page)
        assert not [fault for fault in faults if "Security Policy" in fault or "Error" in fault]
        context.close()


def check_page(page: Page) -> None:
    texts: list[Any] = page.evaluate(TEXTS)
    assert [text for text in texts if any(letter in text for letter in UNPRINTABLE)] == []
    assert page.locator("#main b, #main img, main b, main img").count() == 0
    assert page.evaluate("() => window.pwned") is None


def plant(folder: str) -> None:
    with open(f"{folder}/{NASTY.replace('/', '_')}{MARKUP.replace('/', '_')}", "w"):
        pass


@attack(
    "write escapes, marks of direction and markup into labels, command lines and file names, for the page to show",
    now="harmless: the page shows them as text, with `\\x1b` for what is not printed",
)
def test_escapes_on_the_page(place: Path, queue: QueueUnderTest, window: Page, hostile_texts: None) -> None:
    expect.set_options(timeout=30_000)
    data = place / "data"
    data.mkdir()
    data.chmod(0o777)
    act_as(BEN, plant, str(data))
    job = queue.submit("/bin/echo", *os.listdir(data), gpus=0)
    queue.wait(job)
    waits = queue.submit("true", *os.listdir(data), gpus=2)
    queue.until_state(waits, "queued")
    origin = window.url.partition("#")[0]
    window.reload()
    expect(window.locator("body")).to_contain_text("PWNED")
    expect(window.locator("#jobs-body")).to_contain_text("PWNED")
    check_page(window)
    for shown, text in ((job, "FORGED"), (waits, "Why it waits")):
        window.goto(f"{origin}#/job/{shown}")
        expect(window.locator("#view-job")).to_contain_text(text)
        expect(window.locator("#view-job")).to_contain_text("PWNED")
        check_page(window)
    window.goto(f"{origin}#/job/{job}")
    expect(window.locator("pre.log")).to_contain_text("FORGED")
    check_page(window)


@attack(
    "print addresses with scripts, escapes, marks of direction and markup into a log, for the page to link",
    now="harmless: only addresses of web pages are links, and open without the page's address; the rest is text",
)
def test_addresses_in_a_log(queue: QueueUnderTest, window: Page) -> None:
    hostile = (
        "javascript:window.pwned=1 data:text/html,<script>window.pwned=1</script> //evil.example file:///etc/passwd",
        f"https://evil.example/{NASTY}{MARKUP} https://evil.example/'onmouseover='window.pwned=1'",
        'https://evil.example/"><img src=x onerror=window.pwned=1> http://[broken/ https://\u202eevil.example/\x9b',
        "https://javascript:window.pwned=1@evil.example/ " + "http://x.example/ " * 1000,
    )
    job = queue.submit("/usr/bin/printf", "%s\n", *hostile, gpus=0)
    queue.wait(job)
    window.goto(f"{window.url.partition('#')[0]}#/job/{job}")
    log = window.locator("pre.log")
    expect(log.locator("a").nth(1000)).to_be_attached()
    check_page(window)
    rights = "(links) => links.map((link) => [link.protocol, link.rel, link.target, link.getAttributeNames().join()])"
    found = {tuple(each) for each in log.locator("a").evaluate_all(rights)}
    rest = ("noopener noreferrer nofollow", "_blank", "href,rel,target")
    assert found == {("https:", *rest), ("http:", *rest)}
    assert log.locator("*").evaluate_all("(nodes) => [...new Set(nodes.map((node) => node.localName))]") == ["div", "a"]
    log.locator("a").first.hover()
    check_page(window)
