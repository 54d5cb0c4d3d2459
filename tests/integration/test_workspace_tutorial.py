"""Runs every command of the tutorial in one shell, from an empty folder to a finished sweep."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import running_pid
from tests.integration.queue_fixture import end_leftovers, processes_of
from tests.integration.session_fixture import OwnTmux
from tests.integration.workspace_fixture import BIN

PAGE = Path(__file__).parents[2] / "docs/tutorial-workspaces.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]


def typed() -> list[str]:
    """Return the commands of the tutorial, including empty lines within a command."""
    lines = [line for block in BLOCK.findall(PAGE.read_text()) for line in block.splitlines()]
    assert all(line.startswith(("$ ", ">")) for line in lines), "a console block has a line that is no command"
    return [line[2:] for line in lines]


@pytest.mark.full
def test_the_tutorial_leads_to_a_finished_sweep_and_leaves_nothing_running(
    tmux: OwnTmux, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    empty = own_home.parent / "empty"
    empty.mkdir()
    script = "\n".join(["set -e", *typed()])
    try:
        result = subprocess.run(
            ["sh", "-c", script], cwd=empty, capture_output=True, text=True, timeout=100, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        status = [str(BIN / "gpuyard"), "workspace", "--workspace", str(empty / "lines"), "status", "--json"]
        answer = json.loads(subprocess.run(status, capture_output=True, check=True).stdout)
    finally:
        monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
        end_leftovers(own_home)
    assert (answer["counts"]["completed"], answer["counts"]["total"], answer["over"]) == (6, 6, True)
    assert {(row["state"], row["attempt"]) for row in answer["tasks"]} == {("completed", 1)}
    markers = sorted((empty / "lines/out").iterdir())
    assert [path.name for path in markers] == [f"exp{number}_completed.txt" for number in range(1, 7)]
    assert "slope 3.0" in markers[0].read_text()
    for text in ("exp6  job 6\n", "6 of 6 done", "Nothing to do: 6 configs", "0 tasks ended, 7 sessions closed.\n"):
        assert text in result.stdout
    assert "job 7" not in result.stdout
    assert (tmux.sessions(), processes_of(own_home), running_pid(own_home / "daemon.lock")) == ([], [], None)
