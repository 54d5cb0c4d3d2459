"""Modules of the page, called directly: splitting of command lines, and the length limit of logs."""

import pytest
from playwright.sync_api import expect

from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named
from tests.terminal_lines import SHOWN

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]

SPLIT = "async (line) => (await import('/static/submit.js')).asWords(line)"
SHOW = "async (line) => (await import('/static/log.js')).asShown(line)"
LONG_LINES = """async (id) => {
  const {Log} = await import('/static/log.js');
  const log = new Log(id);
  log.close();
  for (let line = 0; line < 200; line++) log.write('x'.repeat(60000) + '\\n');
  log.write('the last');
  const before = [log.lines.textContent.length, log.lines.lastChild.textContent];
  for (let line = 0; line < 6000; line++) log.write(`${line}\\n`);
  return [...before, log.lines.childElementCount, log.lines.lastChild.textContent];
}"""


def test_a_command_line_is_split_as_a_shell_would(shown: Shown) -> None:  # noqa: F811
    for line, arguments in (
        ("""echo 'a  b' "c d"e""", ["echo", "a  b", "c de"]),
        ("""echo "it's" 'x'""", ["echo", "it's", "x"]),
        ("""python t.py --lr {lr} --note '$5 & more'""", ["python", "t.py", "--lr", "{lr}", "--note", "$5 & more"]),
        ("echo 'open", None),
    ):
        assert shown.page.evaluate(SPLIT, line) == arguments, line
    for line in (
        """echo "it's" $HOME 'x'""",
        """echo "it's $HOME" 'x'""",
        """cat "it's" | wc 'x'""",
        """echo "a \\" b" '$x'""",
        "A=1 true",
        "ls *.py",
    ):
        assert shown.page.evaluate(SPLIT, line) == ["/bin/sh", "-c", line], line


def test_the_page_shows_an_overwritten_line_as_the_command_line_does(shown: Shown) -> None:  # noqa: F811
    assert [shown.page.evaluate(SHOW, line) for line, _ in SHOWN] == [expected for _, expected in SHOWN]


def test_the_page_keeps_a_limited_part_of_a_log_even_with_long_lines(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.shell("true", gpus=0)
    shown.queue.wait(job)
    letters, last, lines, newest = shown.page.evaluate(LONG_LINES, job)
    assert letters < 2_500_000
    assert last == "the last"
    assert (lines, newest) == (5000, "5999")


def test_a_double_click_submits_once(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("true", gpus=0, name="once")
    shown.queue.wait(job)
    page = shown.at(f"/job/{job}")
    shown.button("Submit again…").click()
    page.get_by_role("dialog").get_by_role("button", name="Submit again").dblclick()
    page.wait_for_url(f"**/#/job/{job + 1}")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert [each["id"] for each in shown.queue.get("/jobs", all="1", search="once")["jobs"]] == [job + 1, job]
