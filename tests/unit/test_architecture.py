"""The state diagram in ARCHITECTURE.md matches the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.model.lifecycle import TRANSITIONS

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/state-diagram"


def drawn(root: Path = ROOT, *arguments: str) -> str:
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a copy of the script and its own ARCHITECTURE.md."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / SCRIPT).write_bytes((ROOT / SCRIPT).read_bytes())
    return tmp_path


def test_the_diagram_is_generated_from_the_transition_table() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- states -->\n(.*?)<!-- /states -->", text, re.DOTALL)
    assert shown is not None
    assert shown[1] == drawn(), "run scripts/state-diagram --write"


def test_the_diagram_has_every_transition_and_no_other() -> None:
    groups = {name: states.split() for name, states in re.findall(r"state (\w+) \{\n([^}]+)\}", drawn())}
    arrows = [
        (before, event, after)
        for group, after, events in re.findall(r"(\w+) --> (\w+): (.+)", drawn())
        for before in groups.get(group, [group])
        for event in events.split(", ")
    ]
    assert sorted(arrows) == sorted((before, event, after) for (before, event), after in TRANSITIONS.items())


def test_writing_replaces_only_the_text_between_the_markers(project: Path) -> None:
    page = project / "ARCHITECTURE.md"
    page.write_text("before\n<!-- states -->\nold\n<!-- /states -->\nafter\n")
    drawn(project, "--write")
    assert page.read_text() == f"before\n<!-- states -->\n{drawn()}<!-- /states -->\nafter\n"


def test_a_page_without_markers_is_not_changed(project: Path) -> None:
    page = project / "ARCHITECTURE.md"
    page.write_text("no marks\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        drawn(project, "--write")
    assert "put the two marks where the diagram belongs" in caught.value.stderr
    assert page.read_text() == "no marks\n"
