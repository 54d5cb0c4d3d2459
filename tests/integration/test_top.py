"""`gpuyard top` with a real daemon: its panels, its keys, and restarts of the daemon."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.installation import find_installation
from gpuyard.ui.tui.app import Top
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until
from tests.integration.terminal import Terminal

Scenario = Callable[["Screen"], Awaitable[None]]


class Screen:
    """The terminal of a user: its text, keys and mouse."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self._pilot = pilot

    @property
    def text(self) -> str:
        strips = self._pilot.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    async def type(self, *keys: str) -> None:
        await self._pilot.press(*keys)

    async def paste(self, text: str) -> None:
        self._pilot.app.post_message(events.Paste(text))
        await self._pilot.pause()

    async def click(self, text: str) -> None:
        line = next(number for number, line in enumerate(self.text.splitlines()) if text in line)
        await self._pilot.click(offset=(10, line))

    async def wheel(self, panel: str, lines: int) -> None:
        widget = self._pilot.app.query_one(panel)
        for _ in range(lines):
            wheeled = events.MouseScrollDown(widget, 5, 5, 0, 1, 0, shift=False, meta=False, ctrl=False)
            widget.post_message(wheeled)

    async def until(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, f"timeout: {what}\n{self.text}"
            await self._pilot.pause(0.02)

    async def shows(self, *texts: str) -> None:
        await self.until(lambda: all(text in self.text for text in texts), " and ".join(map(repr, texts)))

    async def no_longer_shows(self, text: str) -> None:
        await self.until(lambda: text not in self.text, f"the end of '{text}'")

    async def chooses(self, job_id: int) -> None:
        await self.shows(f"job {job_id} ")


def watch(scenario: Scenario, size: tuple[int, int] = (100, 30)) -> None:
    async def run() -> None:
        async with Top(is_unicode=True).run_test(size=size) as pilot:
            await scenario(Screen(pilot))

    asyncio.run(run())


def test_devices_queue_and_log_are_updated(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    script = f"echo first line; echo warning >&2; read word < {gate}; echo $word"
    job_id = queue.shell(script, name="talker", vram="6G", split_stderr=True)

    async def scenario(screen: Screen) -> None:
        await screen.shows("Simulated 24 GB", "▄", "reserved 6", "free 18 GB", "1 running", "● running", "talker")
        await screen.shows("first line", "warning")
        gate.write_text("last line\n")
        await screen.shows("last line", "✓ succeeded", "free 24 GB")
        queue.shell("echo second", name="later", gpus="0")
        await screen.shows("later", "2 succeeded")

    watch(scenario)
    assert queue.state(job_id) == "succeeded"


def test_keys_act_on_the_selected_job_and_show_the_result(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    first, second, third = (queue.shell(":", gpus="0", name=name) for name in ("one", "two", "three"))

    async def scenario(screen: Screen) -> None:
        await screen.chooses(first)
        await screen.type("down")
        await screen.chooses(second)
        await screen.type("h")
        await screen.shows(f"held {second}", "‖ held")
        assert queue.state(second) == "held"
        await screen.type("h")
        await screen.shows(f"hold does not apply to job {second}, which is held")
        await screen.type("r")
        await screen.shows(f"released {second}")
        assert queue.state(second) == "queued"
        await screen.type("plus", "plus", "minus", "plus")
        await screen.shows(f"priority 2 for {second}")
        await screen.until(lambda: queue.job(second)["priority"] == 2, "its priority")
        await screen.type("c")
        await screen.shows(f"cancel job {second} two?")
        await screen.type("n")
        await screen.shows("no job changed")
        assert queue.state(second) == "queued"
        await screen.type("c", "y")
        await screen.shows(f"cancelled {second}", "- cancelled")
        await screen.chooses(second)
        await screen.type("t")
        await screen.shows(f"queued again {second}")
        assert queue.state(second) == "queued"
        await screen.shows("paused: no new jobs start")
        await screen.type("p")
        await screen.shows("let jobs start again?")
        await screen.type("y")
        await screen.shows("jobs start again", "3 succeeded")
        await screen.type("p", "y")
        await screen.shows("paused: 0 still running", "paused: no new jobs start")

    watch(scenario)
    assert [queue.state(job_id) for job_id in (first, second, third)] == ["succeeded"] * 3


def test_a_key_suspends_and_resumes_a_job(queue: QueueUnderTest) -> None:
    sim_job = (sys.executable, "-m", "gpuyard", "sim-job", "--vram", "2G", "--seconds", "600")
    job_id = queue.submit(*sim_job, vram="3G", environment=dict(os.environ))

    async def scenario(screen: Screen) -> None:
        await screen.shows("own 2", "reserved 1")
        await screen.type("s")
        await screen.shows(f"suspending {job_id}", "◐ suspended")
        await screen.type("u")
        await screen.shows(f"will resume when memory is free: {job_id}", "● running")

    watch(scenario)
    assert queue.state(job_id) == "running"


def test_pages_show_the_details_of_a_job_and_why_it_waits(queue: QueueUnderTest) -> None:
    running, gate = queue.start_gated(gpus="2")
    waiting = queue.shell("echo started", vram="20G", name="patient")

    async def scenario(screen: Screen) -> None:
        await screen.chooses(running)
        await screen.type("j")
        await screen.chooses(waiting)
        await screen.type("w")
        await screen.shows(f"why: job {waiting} patient", f"job {waiting} waits for 1 GPU", f"job {running}")
        gate.write_text("\n")
        await screen.shows(f"job {waiting} has succeeded")
        await screen.type("escape", "enter")
        await screen.shows(
            "result: exit status 0", "history", "submitted  by", "attempt 1 succeeded", "environment: PATH"
        )
        await screen.type("q", "l")
        await screen.shows("started", "Esc: back")
        await screen.type("escape", "question_mark")
        await screen.shows("raise, lower its priority")
        await screen.type("escape")
        await screen.shows("── Queue")

    watch(scenario)


def test_the_log_page_follows_a_log_until_the_user_scrolls_up(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    queue.shell(f"seq 1000 1200; read word < {gate}; echo $word; echo {'x' * 300}END", gpus="0")

    async def scenario(screen: Screen) -> None:
        await screen.shows("1200")
        await screen.type("l")
        await screen.shows("1180", "1200", "of 201")
        await screen.type("home")
        await screen.shows("1000", "1-29 of 201")
        gate.write_text("the end\n")
        await screen.shows("1-29 of 203")
        await screen.type("end")
        await screen.shows("the end")
        assert "END" not in screen.text
        await screen.type(*["right"] * 16)
        await screen.shows("END")

    watch(scenario)


def test_the_filter_shows_only_matching_jobs(queue: QueueUnderTest) -> None:
    queue.shell("exit 3", gpus="0", name="broken")
    queue.wait()
    queue.post("/pause")
    for name in ("lemon", "orange", "lime"):
        queue.shell(":", gpus="0", name=name)

    async def scenario(screen: Screen) -> None:
        await screen.shows("lemon", "orange", "lime", "✗ failed", "exit status 3")
        await screen.type("slash", *"lime")
        await screen.no_longer_shows("orange")
        assert "lime" in screen.text
        await screen.type("enter", "h")
        await screen.shows("held ", "only 'lime'")
        await screen.type("escape")
        await screen.shows("orange")
        await screen.type("f", "f")
        await screen.shows("finished jobs: none")
        await screen.no_longer_shows("✗ failed")
        await screen.type("slash", *"nowhere")
        await screen.shows("no job matches 'nowhere'")

    watch(scenario)


def test_a_large_paste_into_the_filter_is_ignored(queue: QueueUnderTest) -> None:
    queue.shell(":", gpus="0", name="alpha")

    async def scenario(screen: Screen) -> None:
        await screen.shows("alpha", "succeeded")
        await screen.type("slash")
        await screen.paste("x" * 100_000)
        await screen.type("a", "l", "p")
        await screen.shows("only jobs with alp", "alpha")

    watch(scenario)


def test_a_long_queue_is_fetched_by_its_visible_part(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    first = queue.shell(": {index}", gpus="0", array="0-4999", name="many")

    async def scenario(screen: Screen) -> None:
        await screen.shows(f"{first}-{first + 4999}", "0/5,000 done")
        await screen.type("enter")
        await screen.shows("of 5,000", "many[0]")
        await screen.type("end")
        await screen.shows("many[4999]", "of 5,000")
        await screen.chooses(first + 4999)
        await screen.type("pageup", "up")
        await screen.until(lambda: "many[4999]" not in screen.text, "the rows before the last")
        await screen.type("home")
        await screen.shows("many[0]")

    watch(scenario, (80, 24))


def test_top_reconnects_to_a_restarted_daemon(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    queue.shell(f"echo before; read word < {gate}; echo after", gpus="0", name="survivor")

    async def scenario(screen: Screen) -> None:
        await screen.shows("before", "survivor")
        queue.stop()
        await screen.shows("reconnecting: ", "survivor")
        await screen.type("h")
        await screen.shows("no daemon runs")
        queue.start()
        await screen.no_longer_shows("reconnecting")
        gate.write_text("\n")
        await screen.shows("after", "✓ succeeded")

    watch(scenario)


def test_top_starts_a_killed_daemon_again(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(gpus="0")

    async def scenario(screen: Screen) -> None:
        await screen.chooses(job_id)
        queue.kill9()
        await screen.until(lambda: running_pid(queue.home / "daemon.lock"), "another daemon")
        gate.write_text("\n")
        await screen.shows("✓ succeeded")
        await screen.no_longer_shows("reconnecting")

    watch(scenario)
    queue.post("/stop")
    queue.client.close()
    until(lambda: running_pid(queue.home / "daemon.lock") is None, "the end of the daemon")


def test_the_mouse_selects_and_scrolls(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    first = queue.shell(": {index}", gpus="0", array="0-29", name="many")

    async def scenario(screen: Screen) -> None:
        await screen.shows(f"{first}-{first + 29}", "free 24 GB")
        await screen.type("enter")
        await screen.shows("many[3]")
        await screen.click("many[3]")
        await screen.chooses(first + 3)
        await screen.wheel("#queue", 2)
        await screen.chooses(first + 5)

    watch(scenario)


def test_a_daemon_that_does_not_answer_is_reported_and_waited_for(queue: QueueUnderTest) -> None:
    assert queue.daemon is not None
    daemon = queue.daemon.pid

    async def scenario(screen: Screen) -> None:
        await screen.shows("The queue is empty")
        os.kill(daemon, signal.SIGSTOP)
        try:
            await screen.shows("no answer for ")
            await screen.type("p", "y")
        finally:
            os.kill(daemon, signal.SIGCONT)
        await screen.shows("paused: 0 still running")
        await screen.no_longer_shows("no answer for ")

    watch(scenario)


# The command


@pytest.mark.needs("tmux")
@pytest.mark.usefixtures("unmeasured")
def test_a_small_terminal_without_colour_shows_all_panels(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate = queue.gate()
    queue.shell(f"read word < {gate}", name="trainer", vram="6G")
    tmux = ("tmux", "-S", str(tmp_path / "tmux"), "-f", os.devnull)
    environment = {**os.environ, "LC_ALL": "C", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gpuyard", "top"]
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "24", *command], check=True, env=environment)

    def picture(*how: str) -> str:
        return subprocess.run([*tmux, "capture-pane", "-p", *how], capture_output=True, text=True, check=False).stdout

    try:
        until(lambda: "running    trainer" in picture() and "reserved 6" in picture(), "devices and jobs")
        shown = picture()
        assert shown.isascii()
        assert not re.search("\x1b\\[[0-9;]*3[0-7]m", picture("-e")), "no colours"
        assert "0 Simulated 24 GB ==" in shown
        assert "1 Simulated 24 GB .." in shown
        subprocess.run([*tmux, "send-keys", "q"], check=True)
        until(lambda: not picture(), "its end")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
        gate.write_text("\n")


def test_without_a_terminal_it_names_an_alternative() -> None:
    done = subprocess.run([sys.executable, "-m", "gpuyard", "top"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert "gpuyard queue" in done.stderr


def test_without_textual_it_names_the_package_to_install() -> None:
    without = "import sys; sys.modules['textual'] = None; sys.argv = ['gpuyard', 'top']"
    script = f"{without}\nfrom gpuyard.ui.cli import main; main()"
    terminal = Terminal([sys.executable, "-c", script], {})
    status, output = terminal.end()
    terminal.close()
    assert status == 1
    assert find_installation().with_extra("top") in output
