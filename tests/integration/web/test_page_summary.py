"""The summary on the page: causes of failures, and a button that retries exactly the jobs that it shows."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Request, expect

from tests.fakes.queue_command import run
from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]
RETRY = "**/v1/jobs/retry"


def fail(queue_page: Shown, text: str, count: int) -> int:
    return queue_page.queue.shell(f"echo {text}; exit 1", gpus=0, array=f"1-{count}")


def ids_of(request: Request) -> list[str]:
    body: dict[str, str] = request.post_data_json or {}
    return body["ids"].split()


def test_causes_are_counted_and_the_failed_jobs_retried(shown: Shown) -> None:  # noqa: F811
    shown.queue.submit("true", gpus=0)
    first = fail(shown, "ValueError: loss is NaN at step $GPUYARD_JOB_ID", 3)
    fail(shown, "OSError: <b>No space left on device</b>".replace("<", "'<'").replace(">", "'>'"), 1)
    shown.queue.wait()
    page = shown.at()
    banner = page.locator(".summary")
    expect(banner.locator("li")).to_have_text([
        f"3 ×ValueError: loss is NaN at step …jobs {first}-{first + 2}",  # noqa: RUF001
        f"1 ×OSError: <b>No space left on device</b>job {first + 3}",  # noqa: RUF001
    ])  # fmt: skip
    expect(banner).to_contain_text("1 succeeded · 4 failed")
    expect(banner.locator("li a").first).to_have_attribute("href", f"#/job/{first}")

    with page.expect_request(RETRY) as asked:
        banner.get_by_role("button", name="Retry 4 failed").click()
    expect(page.locator(".toast").filter(has_text="4 jobs queued again")).to_be_visible()
    assert ids_of(asked.value) == [str(first + at) for at in range(4)]
    shown.queue.wait()
    assert [len(shown.queue.job(first + at)["attempts"]) for at in range(4)] == [2, 2, 2, 2]


def test_a_job_that_was_retried_elsewhere_meanwhile_is_left_alone(shown: Shown) -> None:  # noqa: F811
    gate, marker = shown.queue.gate(), shown.queue.home.parent / "retried"
    script = f"[ -e {marker} ] && read word < {gate}; echo KeyError: 2; exit 1"
    first = shown.queue.shell(script, gpus=0)
    fail(shown, "KeyError: 3", 1)
    shown.queue.wait()
    page = shown.at()
    banner = page.locator(".summary")
    expect(banner).to_contain_text(f"{shown.queue.get('/summary')['failed']} failed")
    button = banner.get_by_role("button", name="Retry ")
    marker.touch()
    shown.queue.post("/jobs/retry", ids=str(first))
    shown.queue.until_state(first, "running")
    with page.expect_request(RETRY) as asked:
        button.click()
    ids = ids_of(asked.value)
    gate.write_text("go\n")
    assert str(first) not in ids
    assert str(first + 1) in ids
    shown.queue.wait()


def test_a_hidden_summary_stays_hidden_until_another_job_fails(shown: Shown) -> None:  # noqa: F811
    fail(shown, "ValueError: 1", 1)
    shown.queue.wait()
    page = shown.at()
    banner = page.locator(".summary")
    expect(banner).to_contain_text(f"{shown.queue.get('/summary')['failed']} failed")
    banner.get_by_role("button", name="Hide").click()
    expect(banner).to_be_hidden()
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    expect(banner.locator("h2")).to_contain_text("Since ")  # it is loaded, and stays hidden
    expect(banner).to_be_hidden()
    fail(shown, "KeyError: 1", 1)
    expect(banner).to_be_visible()


def test_results_that_cannot_be_brought_back_are_named_until_they_are(
    shown: Shown,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "runs").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUYARD_HOME", str(shown.queue.home))
    page = shown.at()
    script = "rm -f runs; mkdir runs; echo r > runs/model.pt"
    submitted = run("submit", "--gpus", "0", "--snapshot", "--", "/bin/sh", "-c", script)
    assert submitted.returncode == 0, submitted.stderr
    lines = page.locator(".summary .warnings li")
    expect(lines).to_have_text([re.compile(f"cannot be brought back: {tmp_path}/runs/model.pt: Not a directory")])
    expect(page.locator(".summary")).to_have_attribute("data-tone", "bad")
    (tmp_path / "runs").unlink()
    assert run("clean").returncode == 0
    expect(lines).to_have_count(0)
