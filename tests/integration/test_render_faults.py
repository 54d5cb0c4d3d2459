"""`gpuyard render` when its renderer prints, its readers disconnect, its disk is full, or it is killed."""

import json
import os
import signal
import subprocess
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
    outputs,
    render,
    rendered,
    rendering,
    skipped,
)

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.usefixtures("unmeasured"),  # an interrupt under the coverage tracer can hang the process
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


# Output of a renderer


def test_with_json_output_of_the_renderer_goes_to_standard_error() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    result = run("render", "manifest.jsonl", "--renderer", "talkative:render", *BUDGETS, "--json")
    assert json.loads(result.stdout)["status"]["rendered"] == 24
    assert result.returncode == 0
    assert [name for name in ALL if f"printed {name}" not in result.stderr] == []
    printed = ("on import", "kept", "by number", "by C", "by a child")
    assert [result.stderr.count(text) for text in printed] == [1, 24, 24, 24, 24]


# Readers that disconnect


def status_now() -> Any:
    return json.loads(Path("status.json").read_text()) if Path("status.json").exists() else {}


def await_newer_status() -> None:
    before = status_now().get("now", "")
    until(lambda: status_now().get("now", "") > before, "a newer status")


def test_a_closed_standard_error_stops_neither_the_run_nor_the_status_file() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        begun = await_begun(2)
        assert process.stderr is not None
        process.stderr.close()
        await_newer_status()
        process.send_signal(signal.SIGTERM)
        await_newer_status()
        open_gate()
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(DEADLINE_S) == 143
        process.stderr = None
    assert output.startswith("2 of 24 labels rendered, 22 left")
    assert (rendered(), status_now()["state"]) == (begun, "interrupted")


def test_a_renderer_may_print_to_a_closed_standard_error() -> None:
    Path("talkative.py").write_text(TALKATIVE)
    command = [*GPUYARD, "render", "manifest.jsonl", "--renderer", "talkative:render", "--json", *BUDGETS]
    reads, writes = os.pipe()
    os.close(reads)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writes, timeout=DEADLINE_S, check=False)
    os.close(writes)
    assert json.loads(result.stdout)["status"]["rendered"] == 24
    assert result.returncode == 0


def test_a_closed_standard_output_is_an_error_after_all_labels_are_rendered() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        await_begun(2)
        assert process.stdout is not None
        process.stdout.close()
        open_gate()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(DEADLINE_S) == 1
        process.stdout = None
    assert "Traceback" not in errors
    assert (rendered(), status_now()["state"]) == (ALL, "finished")


def test_a_second_ctrl_c_leaves_the_status_file_as_interrupted() -> None:
    with closed_gate(), rendering("gated", "--status", "status.json") as process:
        assert process.stderr is not None
        await_begun(2)
        await_newer_status()
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    assert status_now()["state"] == "interrupted"


# A full disk


def test_a_full_disk_for_the_list_of_skipped_labels_is_reported() -> None:
    Path("full.py").write_text(FULL)
    typed = ("manifest.jsonl", "--renderer", "full:render", *BUDGETS, "--status", "status.json", "--json")
    result = run("render", *typed)
    assert result.returncode == 1
    assert "skipped.jsonl cannot be written: File too large" in result.stderr
    assert 0 < len(skipped()) < 24
    assert {skip["label"] for skip in json.loads(result.stdout)["skipped"]} == ALL
    assert (status_now()["state"], status_now()["skipped"]) == ("finished", 24)


def test_a_final_status_that_cannot_be_written_is_reported() -> None:
    with closed_gate() as open_gate, rendering("gated", "--status", "status.json") as process:
        await_begun(2)
        await_newer_status()
        Path("status.json").unlink()
        Path("status.json").mkdir()
        Path("status.json/file").touch()
        open_gate()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert output.startswith("24 of 24 labels rendered")
    assert "status.json cannot be written" in errors


# Kills


@pytest.mark.parametrize("dying", ["dying", "dying_before_rename", "dying_after_rename"])
def test_after_repeated_kill_9_the_outputs_equal_those_of_an_undisturbed_run(dying: str) -> None:
    assert render("render", "--out", "undisturbed").returncode == 0
    expected = outputs("undisturbed")
    before: set[str] = set()
    for _ in range(2):
        killed = render(dying, "--resume")
        assert killed.returncode == -9, killed.stderr
        now = outputs()
        assert {name: content for name, content in expected.items() if name in now} == now
        assert before < rendered() < ALL
        before = rendered()
    assert list(Path("out/.partial").iterdir())
    assert render("render", "--resume").returncode == 0
    assert outputs() == expected
    assert not Path("out/.partial").exists()
