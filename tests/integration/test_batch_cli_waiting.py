"""A batch that is followed in the foreground: its progress, and what ends the command but not the batch."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.fakes.queue_standin import ReceivedRequest, StandIn, job
from tests.integration.batch_fixture import DEADLINE_S, GATED, OPEN, await_run, batch, begun, let_go, queue, summary_in  # noqa: F401 - a fixture is among them
from tests.integration.terminal import Terminal
from tests.scale import some

pytestmark = pytest.mark.usefixtures("queue")
TELLS_EVERY_S = 5.0
# Interrupting a program while coverage's tracer holds its lock can deadlock, so these are not measured.
interrupted = pytest.mark.usefixtures("unmeasured")


def test_progress_in_a_pipe_is_an_occasional_line(tmp_path: Path) -> None:
    began = time.monotonic()
    result = batch(2, program="true")
    took_s, lines = time.monotonic() - began, result.stderr.splitlines()
    assert all(line.startswith("gpuyard: ") and " of 2 done, " in line for line in lines)
    assert 1 <= len(lines) <= 3 + took_s // TELLS_EVERY_S


def test_a_paused_queue_is_named_as_what_the_batch_waits_for(tmp_path: Path) -> None:
    run("pause")
    with begun("batch", "--count", "1", *OPEN, "--", "true") as process:
        assert process.stderr is not None
        assert "1 waiting; the queue is paused: `gpuyard unpause` resumes it; " in process.stderr.readline()
        run("unpause")
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


@pytest.fixture
def on_terminal(request: pytest.FixtureRequest) -> Callable[..., Terminal]:
    def begin(*arguments: str) -> Terminal:
        terminal = Terminal([*GPUYARD, *arguments], {"COLUMNS": "100", "LINES": "24", "PYTHONUTF8": "1"})
        request.addfinalizer(terminal.close)
        return terminal

    return begin


# Interrupts

ASKED = "Leave it running, or stop it? [L/s] "


@interrupted
@pytest.mark.needs("setsid")
@pytest.mark.parametrize("answer", some(["\n", "l\n", "\x04", "\x03"], 0, 2), ids=["enter", "l", "end", "ctrl-c"])
def test_ctrl_c_asks_and_can_leave_the_batch_running(
    tmp_path: Path, answer: str, on_terminal: Callable[..., Terminal]
) -> None:
    terminal = on_terminal("batch", "--count", "2", *OPEN, "--output-root", "out", "--", "sh", "-c", GATED)
    await_run(tmp_path, 0)
    terminal.read_until("1 running")
    terminal.type("\x03")
    terminal.read_until(ASKED)
    terminal.type(answer)
    status, output = terminal.end()
    assert status == 130
    assert "the batch continues in the queue as jobs 1-2; `gpuyard queue` shows them" in output
    let_go(tmp_path, 0, 1)
    assert run("wait", "1-3").returncode == 0


@interrupted
@pytest.mark.needs("setsid")
def test_ctrl_c_asks_and_can_cancel_the_batch(tmp_path: Path, on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal("batch", "--count", "3", *OPEN, "--output-root", "out", "--", "sh", "-c", GATED)
    let_go(tmp_path, 0)
    await_run(tmp_path, 1)
    terminal.read_until("1 of 3 done")
    terminal.type("\x03")
    terminal.read_until(ASKED)
    terminal.type("s\n")
    status, output = terminal.end()
    assert (status, "sh: 1 of 3 runs succeeded, 2 cancelled" in output) == (1, True), output
    assert summary_in(tmp_path / "out")["cancelled"] == 2


@interrupted
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_without_a_terminal_ctrl_c_leaves_the_batch_running(tmp_path: Path, signum: int, status: int) -> None:
    with begun("batch", "--count", "1", *OPEN, "--output-root", "out", "--", "sh", "-c", GATED) as process:
        assert process.stderr is not None
        process.stderr.readline()
        await_run(tmp_path, 0)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status
    assert ASKED not in errors
    let_go(tmp_path, 0)
    assert run("wait", "1-2").returncode == 0


# Against a stand-in for the daemon


@pytest.fixture
def paced(own_home: Path) -> Iterator[StandIn]:
    """A batch of three that is done after two requests; the job that writes its summary is job 4."""
    with StandIn(own_home) as stand_in:
        tokens = list[str]()

        def submitted(asked: ReceivedRequest) -> dict[str, Any]:
            tokens.append(asked.body["token"])
            first, last = (1, 3) if len(tokens) == 1 else (4, 4)
            return {"first": first, "last": last, "ids": "1-3", "count": last - first + 1, "notes": []}

        def standing(_: ReceivedRequest) -> dict[str, Any]:
            return {
                "token": tokens[0], "count": 3, "done": False, "counts": {"running": 1, "queued": 2}, "gate": "gpu",
                "held_by": "GPU 91% > 80%", "device": "SIM-1", "device_label": "1", "unknown": ["--max-cpu"],
                "now": "2026-01-02T03:04:15.678Z",
            }  # fmt: skip

        waits = iter([{"done": False}, {"done": True}])
        stand_in.answers |= {
            "POST /submissions": submitted,
            "GET /batches/1": standing,
            "GET /jobs/1": job(1, "running"),
            "GET /wait": lambda _: next(waits),
        }
        yield stand_in


@pytest.mark.parametrize(
    ("state", "message", "has_log"),
    [
        ("failed", "gpuyard: the runs have finished, but job 4, which sums them up, is failed\n", True),
        ("cancelled", "gpuyard: job 4, which sums up the runs, was cancelled\n", False),
    ],
)
def test_a_batch_without_a_summary_says_why_and_how_to_get_one(
    tmp_path: Path, paced: StandIn, state: str, message: str, has_log: bool
) -> None:
    paced.answers["GET /jobs/4"] = job(4, state)
    result = batch(3, "--output-root", "out", program="true")
    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr
    assert ("`gpuyard logs 4` may say why" in result.stderr) is has_log
    assert f"`gpuyard retry 4` runs it again, and it writes {tmp_path}/out/summary.json after" in result.stderr


def test_a_cancelled_summary_is_written_when_it_is_retried(tmp_path: Path) -> None:
    with begun("batch", "--count", "1", *OPEN, "--output-root", "out", "--", "sh", "-c", GATED) as process:
        await_run(tmp_path, 0)
        assert run("cancel", "2").returncode == 0
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "job 2, which sums up the runs, was cancelled\n" in errors) == (1, True), errors
    assert run("retry", "2").returncode == 0
    let_go(tmp_path, 0)
    assert run("wait", "2").returncode == 0
    assert summary_in(tmp_path / "out")["succeeded"] == 1


def test_the_gate_that_blocks_the_next_run_is_named_with_its_figure_and_gpu(
    paced: StandIn, on_terminal: Callable[..., Terminal]
) -> None:
    paced.answers["GET /jobs/4"] = job(4, "failed")
    _, output = on_terminal("batch", "--count", "3", *OPEN, "--", "true").end()
    assert "limited by GPU 91% > 80% on GPU 1" in output
    assert "0 of 3 done" in output
    assert "10s" in output
    assert output.count("gpuyard: --max-cpu is not enforced: no probe measures it") == 1
