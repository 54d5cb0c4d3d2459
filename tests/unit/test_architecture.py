"""The state diagram in ARCHITECTURE.md and the index of decisions are what scripts make of the code and of docs/adr."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.model.lifecycle import TRANSITIONS
from tests.known import known

ROOT = Path(__file__).parents[2]
DIAGRAM, INDEX = "scripts/state-diagram", "scripts/adr-index"


def made_by(script: str, root: Path = ROOT, *arguments: str) -> str:
    command = [sys.executable, str(root / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with copies of the scripts, and pages of its own."""
    for folder in ("scripts", "docs/adr"):
        (tmp_path / folder).mkdir(parents=True)
    for script in (DIAGRAM, INDEX):
        (tmp_path / script).write_bytes((ROOT / script).read_bytes())
    return tmp_path


def decide(root: Path, name: str, text: str) -> None:
    (root / "docs/adr" / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "mark", "script"), [("ARCHITECTURE.md", "states", DIAGRAM), ("docs/adr/index.md", "decisions", INDEX)]
)
def test_the_page_has_what_its_script_makes(page: str, mark: str, script: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = known(re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", text, re.DOTALL))
    assert shown[1] == made_by(script), f"run {script} --write"


def test_the_diagram_has_every_transition_and_no_other() -> None:
    drawn = made_by(DIAGRAM)
    groups = {name: states.split() for name, states in re.findall(r"state (\w+) \{\n([^}]+)\}", drawn)}
    arrows = [
        (before, event, after)
        for group, after, events in re.findall(r"(\w+) --> (\w+): (.+)", drawn)
        for before in groups.get(group, [group])
        for event in events.split(", ")
    ]
    assert sorted(arrows) == sorted((before, event, after) for (before, event), after in TRANSITIONS.items())


def test_writing_replaces_only_the_text_between_the_markers(project: Path) -> None:
    page = project / "ARCHITECTURE.md"
    page.write_text("before\n<!-- states -->\nold\n<!-- /states -->\nafter\n")
    made_by(DIAGRAM, project, "--write")
    assert page.read_text() == f"before\n<!-- states -->\n{made_by(DIAGRAM)}<!-- /states -->\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        made_by(DIAGRAM, project, "--write")
    assert "put the two marks where the diagram belongs" in caught.value.stderr
    assert page.read_text() == "no marks\n"


def test_the_index_lists_decisions_with_what_amends_them(project: Path) -> None:
    status = ", amended by [ADR 2](0002-jump.md)"
    decide(project, "0001-walk.md", f"# 1. We walk\n\n*Status: accepted{status} · Date: 2026-01-02*\n\nBecause.\n")
    decide(project, "0002-jump.md", "# 2. We jump\n\n*Status: accepted · Date: 2026-01-03*\n\nBecause.\n")
    decide(project, "index.md", "before\n<!-- decisions -->\nold\n<!-- /decisions -->\nafter\n")
    made_by(INDEX, project, "--write")
    listed = f"- [1. We walk](0001-walk.md){status}\n- [2. We jump](0002-jump.md)\n"
    assert (project / "docs/adr/index.md").read_text(encoding="utf-8") == (
        f"before\n<!-- decisions -->\n{listed}<!-- /decisions -->\nafter\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("# 1. We walk\n\nBecause.\n", id="no status"),
        pytest.param("# 1. We walk\n\n*Status: accepted*\n\nBecause.\n", id="no date"),
        pytest.param("# 1. We walk\n\n*Status: maybe · Date: 2026-01-02*\n\nBecause.\n", id="unknown status"),
        pytest.param("# 2. We walk\n\n*Status: accepted · Date: 2026-01-02*\n\nBecause.\n", id="another number"),
    ],
)
def test_a_decision_without_its_number_status_and_date_is_an_error(project: Path, text: str) -> None:
    decide(project, "0001-walk.md", text)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        made_by(INDEX, project)
    assert "0001-walk.md does not begin with its number" in caught.value.stderr
