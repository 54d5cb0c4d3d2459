"""`gpuyard render` with outputs that other things go to as well, or whose reader goes away, or that are full."""

import contextlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import until
from tests.integration.render_fixture import (
    ALL,
    BUDGETS,
    DEADLINE_S,
    await_begun,
    closed_gate,
    folder,  # noqa: F401 - a fixture is found where it is named
    render,
    rendered,
    rendering,
    skipped,
)

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.usefixtures("unmeasured"),  # one that is interrupted while it is measured can stand still for ever
]

TALKATIVE = """
import ctypes, os, subprocess, sys
import renderers

print("on import")
kept = sys.__stdout__

def render(scene, frames, label, out_dir):
    print(f"printed {label['name']}")
    kept.write("kept\\n")
    os.write(1, b"by number\\n")
    ctypes.CDLL(None).puts(b"by C")
    subprocess.run(["echo", "by a child"], check=True)
    renderers.render(scene, frames, label, out_dir)

def load(path):
    print("loaded")
    return {"x": [1.0, 2.0]}
"""

FULL = """
import resource

def render(scene, frames, label, out_dir):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
    raise ValueError("x" * 500)
"""


# What a renderer prints


def test_with_json_what_the_renderer_prints_is_not_in_the_answer() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    result = run("render", "manifest.jsonl", "--renderer", "talkative:render", *BUDGETS, "--json")
    assert json.loads(result.stdout)["status"]["rendered"] == 24
    assert result.returncode == 0
    assert [name for name in ALL if f"printed {name}" not in result.stderr] == []
    said = ("on import", "kept", "by number", "by C", "by a child")
    assert [result.stderr.count(words) for words in said] == [1, 24, 24, 24, 24]


def test_with_json_what_the_loader_prints_is_not_in_the_profile() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    result = run(
        "render", "profile", "manifest.jsonl", "--loader", "talkative:load", "--device", "host", "--json",
    )  # fmt: skip
    assert len(json.loads(result.stdout)["assets"]) == 5
    assert "loaded" in result.stderr


def test_without_json_what_the_renderer_prints_goes_where_it_says() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    result = run("render", "manifest.jsonl", "--renderer", "talkative:render", *BUDGETS)
    assert result.stdout.count("by number\n") == 24
    assert "by number" not in result.stderr


# Whose reader goes away


def status_now() -> Any:
    return json.loads(Path("status.json").read_text()) if Path("status.json").exists() else {}


def await_newer_status() -> None:
    before = status_now().get("now", "")
    until(lambda: status_now().get("now", "") > before, "a newer status")


def test_a_standard_error_that_nobody_reads_ends_neither_the_run_nor_the_status_file() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        begun = await_begun(2)
        assert process.stderr is not None
        process.stderr.close()
        await_newer_status()
        process.send_signal(signal.SIGTERM)
        await_newer_status()
        open_gate()
        assert process.stdout is not None
        told = process.stdout.read()
        assert process.wait(DEADLINE_S) == 143
        process.stderr = None
    assert told.startswith("2 of 24 labels rendered, 22 left")
    assert (rendered(), status_now()["state"]) == (begun, "interrupted")


def test_a_renderer_may_print_to_a_standard_error_that_nobody_reads() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    command = [*GPUYARD, "render", "manifest.jsonl", "--renderer", "talkative:render", "--json", *BUDGETS]
    reads, writes = os.pipe()
    os.close(reads)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writes, timeout=DEADLINE_S, check=False)
    os.close(writes)
    assert json.loads(result.stdout)["status"]["rendered"] == 24
    assert result.returncode == 0


@contextlib.contextmanager
def on_a_terminal_that_goes() -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """It is not told that the terminal has gone: it is in a session of its own."""
    ours, theirs = pty.openpty()
    command = [*GPUYARD, "render", "manifest.jsonl", "--renderer", "renderers:gated", *BUDGETS]
    process = subprocess.Popen(
        [*command, "--status", "status.json"],
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_a_terminal_that_has_gone_ends_neither_the_run_nor_the_status_file() -> None:
    with closed_gate() as open_gate, on_a_terminal_that_goes() as (process, ours):
        begun = await_begun(2)
        os.close(ours)
        await_newer_status()
        process.send_signal(signal.SIGTERM)
        await_newer_status()
        open_gate()
        assert process.wait(DEADLINE_S) == 143
    assert (rendered(), status_now()["state"]) == (begun, "interrupted")


def test_an_answer_that_nobody_reads_is_a_fault_and_all_is_rendered() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        await_begun(2)
        assert process.stdout is not None
        process.stdout.close()
        open_gate()
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(DEADLINE_S) == 1
        process.stdout = None
    assert "Traceback" not in told
    assert (rendered(), status_now()["state"]) == (ALL, "finished")


def test_a_second_ctrl_c_leaves_a_status_that_says_so() -> None:
    with closed_gate(), rendering("gated", "--status", "status.json") as process:
        assert process.stderr is not None
        await_begun(2)
        await_newer_status()
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    assert status_now()["state"] == "interrupted"


# A disk that is full


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_disk_that_has_no_room_for_what_was_skipped_is_told_beside_the_report(arguments: tuple[str, ...]) -> None:
    Path("full.py").write_text(FULL)
    typed = ["manifest.jsonl", "--renderer", "full:render", *BUDGETS, "--status", "status.json", *arguments]
    result = run("render", *typed)
    assert result.returncode == 1
    assert "skipped.jsonl cannot be written: File too large" in result.stderr
    assert 0 < len(skipped()) < 24
    if arguments:
        assert {skip["label"] for skip in json.loads(result.stdout)["skipped"]} == ALL
    else:
        assert result.stdout.startswith("0 of 24 labels rendered, 24 skipped")
        assert "24: the renderer failed" in result.stdout
    assert (status_now()["state"], status_now()["skipped"]) == ("finished", 24)


def test_a_status_that_cannot_be_written_at_the_end_is_told_beside_the_report() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        await_begun(2)
        await_newer_status()
        Path("status.json").unlink()
        Path("status.json").mkdir()
        Path("status.json/in the way").touch()
        open_gate()
        told, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert told.startswith("24 of 24 labels rendered")
    assert "status.json cannot be written" in errors


# What was skipped before


def test_lines_of_the_last_run_go_where_all_is_complete_and_stay_where_a_run_is_refused() -> None:
    assert render("failing").returncode == 1
    before = skipped()
    assert (len(before), render().returncode, skipped()) == (6, 2, before)
    complete = [name for name in ALL if not name.endswith("-1")]
    Path("manifest.jsonl").write_text("".join(f'{{"scene": "none.ply", "name": "{name}"}}\n' for name in complete))
    assert render("render", "--resume").returncode == 0
    assert skipped() == []
