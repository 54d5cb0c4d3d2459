"""The search of the docs site, used in a browser: questions that users ask lead to the guide that answers them."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).parents[3]
SITE = ROOT / "site"
FIRST = 3

QUESTIONS = {
    "share between users": "how-to/lease-gpus",
    "learn memory": "how-to/share-gpus",
    "remote machine": "how-to/web",
    "uninstall": "how-to/install",
    "out of memory": "how-to/out-of-memory",
    "cancel a job": "how-to/queue",
    "dependencies": "how-to/queue",
    "urgent job": "how-to/suspend",
    "one by one": "how-to/one-by-one",
    "docker": "how-to/containers",
    "slurm": "how-to/slurm",
    "email when a job fails": "how-to/notifications",
    "hyperparameter sweep": "how-to/sweeps",
    "nfs home": "how-to/shared-home",
    "gpu not shown": "how-to/find-a-missing-gpu",
    "where is the log": "how-to/logs",
    "reboot": "how-to/keep-the-queue-running",
    "several gpus": "how-to/multi-gpu",
    "limit ram": "how-to/reserve-ram",
    "progress bar": "how-to/progress",
    "windows": "how-to/wsl2",
    "git submodule": "how-to/use-in-another-project",
}
# Where each link leads within the site, without the slashes at both ends.
PLACES = "links => links.map(link => new URL(link.href).pathname.replace(/^\\/|\\/$/g, ''))"
RECORDS = ("adr", "architecture", "internals", "project/changelog", "reference/attacks")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def docs_site() -> Iterator[str]:
    """The address of the site that `make docs` builds. It is built here only if it is missing or older than a page."""
    index = SITE / "search.json"
    sources = [ROOT / "zensical.toml", ROOT / "scripts/docs-site", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not index.exists() or index.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        for command in (["python", "scripts/docs-site", "prepare"], ["zensical", "build", "--strict", "--clean"]):
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PATH": paths})
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def answers(docs_site: str, browser: Browser) -> dict[str, list[str]]:
    """The pages that the search lists for each question, in order, without repetitions."""
    with browser.new_page() as page:
        page.goto(docs_site)
        page.keyboard.press("/")
        found = page.locator("[role=listbox] a")
        answers = {}
        for question in QUESTIONS:
            page.get_by_role("combobox", name="Search").fill(question)
            expect(found.first).to_be_visible()
            answers[question] = list(dict.fromkeys(found.evaluate_all(PLACES)))
            page.get_by_role("combobox", name="Search").fill("")
            expect(found).to_have_count(0)
        return answers


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_guide_among_the_first_pages(question: str, answers: dict[str, list[str]]) -> None:
    assert QUESTIONS[question] in answers[question][:FIRST], answers[question]


@pytest.mark.needs("chromium")
def test_no_question_finds_records_for_maintainers(answers: dict[str, list[str]]) -> None:
    found = {page for pages in answers.values() for page in pages}
    assert not [page for page in found if page.startswith(RECORDS)]
