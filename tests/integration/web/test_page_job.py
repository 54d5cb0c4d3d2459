"""The page of a job, and the submit form."""

import re

import pytest
from playwright.sync_api import expect

from tests.fakes import gated_job
from tests.integration.queue_fixture import until
from tests.integration.web.hostile import another_site
from tests.integration.web.page_fixture import Shown, shown  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]


def test_a_waiting_job_shows_its_reasons_and_start_estimate(shown: Shown) -> None:  # noqa: F811
    holder, gate = shown.holds("holder", 1024, gpus=2, exclusive=True)
    job = shown.queue.shell("true", vram="8G", name="waits")
    page = shown.at(f"/job/{job}")
    why = page.get_by_role("region", name="Why it waits")
    expect(why).to_contain_text(f"job {job} waits for 1 GPU")
    expect(why).to_contain_text("GPU 0, 1: held by")
    expect(why).to_contain_text(f"job {holder} (")
    expect(why).to_contain_text(
        re.compile("no start estimate yet|it should start in|overdue by")
    )  # an earlier test may have produced an estimate
    expect(page.get_by_role("region", name="Log")).to_contain_text("not started yet")
    gate.touch()
    expect(page.locator("#view-job .state")).to_have_text("succeeded")
    expect(why).to_be_hidden()


def test_a_running_job_shows_its_measured_and_reserved_memory(shown: Shown) -> None:  # noqa: F811
    job, gate = shown.holds("measured", 6144, vram="8G", tag="curves")
    page = shown.at(f"/job/{job}")
    curve = page.get_by_role("img", name="peak 6 GB. 8 GB reserved (dashed), 75% of it used.")
    expect(curve).to_be_visible()
    expect(curve.locator(".limit")).not_to_have_attribute("d", "")
    attempts = page.get_by_role("region", name="Attempts").get_by_role("row")
    expect(attempts).to_have_count(2)
    expect(attempts.nth(1)).to_contain_text("running")
    expect(attempts.nth(1)).to_contain_text("6 GB")
    history = page.get_by_role("region", name="History")
    expect(history).to_contain_text("attempt 1 on SIM-0")
    gate.touch()
    expect(history).to_contain_text("attempt 1 succeeded")
    expect(attempts.nth(1)).to_contain_text("succeeded")


def test_a_failed_job_shows_its_error_then_its_log_then_its_memory(shown: Shown) -> None:  # noqa: F811
    gate = shown.queue.home.parent / "fails.gate"
    program = " ".join((*gated_job.COMMAND, "--vram", "2048", str(gate)))
    # A command of one line, however long the paths are: the page begins with it.
    environment = {**shown.environment, "PROGRAM": program}
    job = shown.queue.shell("$PROGRAM; exit 7", vram="4G", name="fails", environment=environment)
    until(lambda: any(len(each["curve"]) > 1 for each in shown.queue.job(job)["attempts"]), "two points of its memory")
    gate.touch()
    shown.queue.wait(job)
    page = shown.at(f"/job/{job}")
    result = page.get_by_role("region", name="Result")
    expect(result.locator(".errorline")).to_have_text(shown.queue.job(job)["reason"])
    expect(result).to_contain_text("attempt 1 on GPU")
    names = ("Result", "Log", "Memory", "Attempts", "History")
    boxes = [page.get_by_role("region", name=name).bounding_box() for name in names]
    tops = [box["y"] for box in boxes if box is not None]
    assert len(tops) == len(names)
    assert tops == sorted(tops)
    assert tops[1] < 300
    expect(page.get_by_role("toolbar", name="Actions on this job").get_by_role("button")).to_have_text(
        ["Retry", "Submit again…"]
    )
    axes = page.get_by_role("region", name="Memory").locator(".axes")
    expect(axes.locator(".values span")).to_have_text(["5 GB", "2.5 GB", "0"])
    expect(axes.locator(".times span").first).to_have_text("0s")


def test_a_job_that_succeeded_has_no_result_section(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("true", gpus=0)
    shown.queue.wait(job)
    page = shown.at(f"/job/{job}")
    expect(page.get_by_role("region", name="Attempts")).to_be_visible()
    expect(page.get_by_role("region", name="Result")).to_be_hidden()


def test_a_job_out_of_memory_shows_it(shown: Shown) -> None:  # noqa: F811
    says = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB."
    job = shown.queue.shell(f'[ "$GPUYARD_ATTEMPT" -gt 1 ] || {{ echo "{says}" >&2; exit 1; }}', vram="2G")
    shown.queue.wait(job)
    page = shown.at(f"/job/{job}")
    attempts = page.get_by_role("region", name="Attempts").get_by_role("row")
    expect(attempts.last).to_contain_text("out of memory")


def test_a_log_is_followed_and_rendered_like_in_a_terminal(shown: Shown) -> None:  # noqa: F811
    # Two gates: with one, the second reader could see the end of the first write.
    gate, last = shown.queue.gate("log"), shown.queue.gate("last")
    script = (
        "printf '\\033[1;32mgreen\\033[0m\\n'; printf ' 10%%\\r 20%%\\r 30%%'; "
        f"read word < {gate}; printf '\\r100%%\\n'; read word < {last}; echo '<b>last</b>'"
    )
    job = shown.queue.shell(script, gpus=0)
    page = shown.at(f"/job/{job}")
    lines = page.get_by_role("log").locator("div")
    expect(lines).to_have_text(["green", " 30%"])
    gate.write_text("go\n")
    expect(lines).to_have_text(["green", "100%"])
    last.write_text("go\n")
    expect(lines).to_have_text(["green", "100%", "<b>last</b>"])
    expect(page.get_by_role("region", name="Log")).to_contain_text("ended")


def test_standard_error_that_is_told_apart_is_shown_with_the_output(shown: Shown) -> None:  # noqa: F811
    gate, last = shown.queue.gate("aside"), shown.queue.gate("aside-last")
    script = f"echo out; printf half >&2; read word < {gate}; echo more; read word < {last}; echo ' done' >&2"
    job = shown.queue.shell(script, gpus=0, split_stderr=True)
    page = shown.at(f"/job/{job}")
    lines = page.get_by_role("log").locator("div")
    expect(lines).to_have_text(["out", "half"])
    gate.write_text("go\n")
    expect(lines).to_have_text(["out", "more", "half"])
    last.write_text("go\n")
    expect(lines).to_have_text(["out", "more", "half done"])
    expect(page.get_by_role("log").locator(".stderr")).to_have_text(["half done"])


def test_addresses_in_a_log_are_links(shown: Shown) -> None:  # noqa: F811
    lines = (
        "see https://example.org/run?a=1&b=2. (http://localhost:6006/) [HTTP://[::1]:80/x], 'http://quoted.example'",
        "https://example.org/a_(b) http:// http://.. xhttp://no ftp://no.example javascript:alert(1) https://",
    )
    job = shown.queue.submit("printf", r"%s\n", *lines, gpus=0)
    page = shown.at(f"/job/{job}")
    log = page.get_by_role("log")
    expect(log.locator("div")).to_have_text(list(lines))
    links = log.locator("a")
    expect(links).to_have_text(
        ["https://example.org/run?a=1&b=2", "http://localhost:6006/", "HTTP://[::1]:80/x", "http://quoted.example",
         "https://example.org/a_(b)"]
    )  # fmt: skip
    assert links.first.get_attribute("href") == "https://example.org/run?a=1&b=2"
    for name, value in (("target", "_blank"), ("rel", "noopener noreferrer nofollow")):
        assert {links.nth(at).get_attribute(name) for at in range(5)} == {value}


def test_a_link_in_a_log_opens_a_window_that_learns_nothing_of_the_page(shown: Shown) -> None:  # noqa: F811
    with another_site() as port:
        job = shown.queue.submit("echo", f"http://127.0.0.1:{port}/", gpus=0)
        page = shown.at(f"/job/{job}")
        with page.context.expect_page() as opened:
            page.get_by_role("log").get_by_role("link").click()
        other = opened.value
        other.wait_for_load_state()
        assert other.title() == "another site"
        assert other.evaluate("[document.referrer, window.opener]") == ["", None]
        other.close()


def test_commands_in_reasons_and_hints_are_shown_as_code(shown: Shown) -> None:  # noqa: F811
    shown.queue.post("/pause")
    waits = shown.queue.submit("true", gpus=0, name="coded")
    shown.queue.post("/jobs/hold", ids=str(waits))
    page = shown.at("/?search=coded")
    reason = shown.row(waits).locator("td.reason")
    expect(reason).to_have_text(re.compile("held until gpuyard release"))
    expect(reason.locator("code")).to_have_text("gpuyard release")
    shown.at(f"/job/{waits}")
    expect(page.get_by_role("region", name="Why it waits").locator("code").first).to_have_text(
        f"gpuyard release {waits}"
    )
    expect(page.locator("main")).not_to_contain_text("`")
    shown.at("/job/999999")
    expect(page.get_by_role("alert").locator("code")).to_have_text("gpuyard queue --all")
    shown.queue.post("/unpause")
    shown.queue.post("/jobs/cancel", ids=str(waits))


def test_text_between_backticks_stays_text(shown: Shown) -> None:  # noqa: F811
    says = """async (text) => {
      const {el} = await import("/static/dom.js");
      return el("p", {message: text}).innerHTML;
    }"""
    for text, markup in (
        ("run `<img src=x>` now", "run <code>&lt;img src=x&gt;</code> now"),
        ("a `b` and `c`", "a <code>b</code> and <code>c</code>"),
        ("looking for matching ``'", "looking for matching ``'"),
        ("one ` alone <b>", "one ` alone &lt;b&gt;"),
        ("`\x1b[1m\u202e`", "<code>\\x1b[1m\\u202e</code>"),
    ):
        assert shown.page.evaluate(says, text) == markup


@pytest.mark.full
def test_a_long_log_follows_its_end_until_it_is_scrolled_up(shown: Shown) -> None:  # noqa: F811
    gate = shown.queue.gate("long")
    job = shown.queue.shell(f"seq 1 6000; read word < {gate}; seq 6001 6100", gpus=0)
    page = shown.at(f"/job/{job}")
    log = page.get_by_role("log")
    expect(log.get_by_text("6000", exact=True)).to_be_in_viewport()
    assert log.evaluate("(node) => node.childElementCount") <= 5000
    log.evaluate("(node) => { node.scrollTop = 0 }")
    expect(shown.button("Follow ↓")).to_be_visible()
    gate.write_text("go\n")
    expect(log.get_by_text("6100", exact=True)).to_have_count(1)
    expect(log.get_by_text("6100", exact=True)).not_to_be_in_viewport()
    shown.button("Follow ↓").click()
    expect(log.get_by_text("6100", exact=True)).to_be_in_viewport()


def test_a_job_can_be_held_released_suspended_resumed_cancelled_and_retried(shown: Shown) -> None:  # noqa: F811
    shown.queue.post("/pause")
    gate = shown.queue.home.parent / "acted.gate"
    job = shown.queue.submit(
        *gated_job.COMMAND, "--vram", "1024", str(gate), name="acted", vram="2G", environment=shown.environment
    )
    page = shown.at(f"/job/{job}")
    state = page.locator("#view-job .state")
    for verb, comes in (("Hold", "held"), ("Release", "queued")):
        shown.button(verb).click()
        expect(state).to_have_text(comes)
    shown.queue.post("/unpause")
    expect(state).to_have_text("running")
    expect(page.get_by_role("log")).to_contain_text("holding")
    for verb, comes in (("Suspend", "suspended"), ("Resume", "running"), ("Cancel", "cancelled"), ("Retry", "running")):
        shown.button(verb).click()
        expect(state).to_have_text(comes)
    gate.touch()
    expect(state).to_have_text("succeeded")
    expect(page.get_by_role("region", name="Attempts").get_by_role("row")).to_have_count(3)


def test_the_log_and_the_memory_of_each_attempt_can_be_chosen(shown: Shown) -> None:  # noqa: F811
    gates = [shown.queue.gate(f"attempt-{number}") for number in (1, 2)]
    waits = f"read word < {gates[0].parent}/attempt-$GPUYARD_ATTEMPT"
    job = shown.queue.shell(f"echo try $GPUYARD_ATTEMPT; {waits}; exit $((2 - GPUYARD_ATTEMPT))", gpus=0, retries=1)
    page = shown.at(f"/job/{job}")
    choice, log = page.get_by_label("Attempt", exact=True), page.get_by_role("log")
    expect(log).to_contain_text("try 1")
    expect(choice).to_be_hidden()
    gates[0].write_text("go\n")
    expect(log).to_contain_text("try 2")
    choice.select_option("1")
    expect(log.locator("div")).to_have_text(["try 1"])
    expect(choice.locator("option:checked")).to_have_text("1: failed")
    gates[1].write_text("go\n")
    expect(page.locator("#view-job .state")).to_have_text("succeeded")
    expect(log.locator("div")).to_have_text(["try 1"])
    choice.select_option("2")
    expect(log.locator("div")).to_have_text(["try 2"])


def test_a_job_can_be_resubmitted_with_other_arguments(shown: Shown) -> None:  # noqa: F811
    job = shown.queue.submit("echo", "--lr", "1e-3", name="again", gpus=0, priority=3, cwd="/usr")
    shown.queue.wait(job)
    page = shown.at(f"/job/{job}")
    shown.button("Submit again…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Command").fill("echo --lr 1e-4")
    dialog.get_by_label("Priority").fill("high")
    dialog.get_by_role("button", name="Submit again").click()
    expect(dialog.get_by_role("alert")).to_contain_text("--priority takes a whole number, not 'high'")
    dialog.get_by_label("Priority").fill("7")
    dialog.get_by_role("button", name="Submit again").click()
    expect(page.get_by_role("log")).to_have_text("--lr 1e-4")
    new = int(page.url.rpartition("/")[2])
    assert new != job
    job = shown.queue.job(new)
    assert (job["name"], job["priority"], job["cwd"], job["gpus"]) == ("again", 7, "/usr", 0)


def test_the_form_submits_a_job_with_its_values(shown: Shown) -> None:  # noqa: F811
    page = shown.at("/submit")
    page.get_by_role("textbox", name="Command", exact=True).fill("echo 'two words' {index} | tr a-z A-Z; pwd")
    for label, value in {"Folder": "/usr", "Name": "formed", "GPUs": "0", "Priority": "5", "Time limit": "1h"}.items():
        page.get_by_role("textbox", name=label, exact=True).fill(value)
    page.get_by_label("Retries").fill("2")
    page.get_by_role("textbox", name="Tag", exact=True).fill("forms")
    page.get_by_text("A shell runs it").wait_for()
    shown.button("Submit").click()
    expect(page.get_by_role("heading", name="formed · job")).to_be_visible()
    expect(page.get_by_role("log")).to_have_text("TWO WORDS {INDEX}/usr")
    job = shown.queue.job(int(page.url.rpartition("/")[2]))
    assert (job["time_limit_s"], job["retries"], job["tag"], job["priority"]) == (3600, 2, "forms", 5)


def test_the_form_shows_an_error_beside_its_field_with_a_remedy(shown: Shown) -> None:  # noqa: F811
    page = shown.at("/submit")
    shown.button("Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("There is no program to run.")
    page.get_by_role("textbox", name="Command", exact=True).fill("sleep 1")
    page.get_by_role("textbox", name="GPUs").fill("some")
    shown.button("Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("--gpus takes a whole number, not 'some'")
    expect(page.get_by_role("textbox", name="GPUs")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("textbox", name="GPUs")).to_be_focused()
    page.get_by_role("textbox", name="GPUs").fill("1")
    page.get_by_role("textbox", name="Memory on each GPU").fill("90G")
    shown.button("Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("no GPU has 90 GB")
    expect(page.get_by_role("alert")).to_contain_text("shows the memory of each")


def test_a_sweep_of_the_form_makes_one_job_per_value(shown: Shown) -> None:  # noqa: F811
    page = shown.at("/submit")
    page.reload()
    page.get_by_role("textbox", name="Command", exact=True).fill("echo {lr}-{seed}")
    page.get_by_role("textbox", name="GPUs").fill("0")
    page.get_by_role("textbox", name="Name", exact=True).fill("swept")
    page.get_by_text("More: array").click()
    page.get_by_label("Sweep").fill("lr=1,2\nseed=0-2")
    shown.button("Submit").click()
    expect(page.get_by_text("6 jobs are in the queue")).to_be_visible()
    until(lambda: shown.queue.get("/jobs", all="1", search="swept")["total"] == 6, "the jobs of the sweep")


def test_a_missing_job_is_reported(shown: Shown) -> None:  # noqa: F811
    page = shown.at("/job/987654")
    expect(page.get_by_role("alert")).to_contain_text("there is no job 987654")
