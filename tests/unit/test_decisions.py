"""The index page lists every decision in docs/adr."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/adr-index"


def run(root: Path, *arguments: str) -> str:
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a copy of the script and its own decisions."""
    for folder in ("scripts", "docs/adr"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / SCRIPT).write_bytes((ROOT / SCRIPT).read_bytes())
    return tmp_path


def decide(root: Path, name: str, text: str) -> None:
    (root / "docs/adr" / name).write_text(text, encoding="utf-8")


def test_the_index_lists_every_decision_with_what_amends_it() -> None:
    text = (ROOT / "docs/adr/index.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- decisions -->\n(.*?)<!-- /decisions -->", text, re.DOTALL)
    assert shown is not None
    assert shown[1] == run(ROOT), "run scripts/adr-index --write"


def test_writing_replaces_the_text_between_the_markers(project: Path) -> None:
    status = ", amended by [ADR 2](0002-jump.md)"
    decide(project, "0001-walk.md", f"# 1. We walk\n\n*Status: accepted{status} · Date: 2026-01-02*\n\nBecause.\n")
    decide(project, "0002-jump.md", "# 2. We jump\n\n*Status: accepted · Date: 2026-01-03*\n\nBecause.\n")
    decide(project, "index.md", "before\n<!-- decisions -->\nold\n<!-- /decisions -->\nafter\n")
    run(project, "--write")
    assert (project / "docs/adr/index.md").read_text(encoding="utf-8") == (
        "before\n<!-- decisions -->\n"
        f"- [1. We walk](0001-walk.md){status}\n"
        "- [2. We jump](0002-jump.md)\n"
        "<!-- /decisions -->\nafter\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "# 1. We walk\n\nBecause.\n",
        "# 1. We walk\n\n*Status: accepted*\n\nBecause.\n",
        "# 1. We walk\n\n*Status: maybe · Date: 2026-01-02*\n\nBecause.\n",
        "# 2. We walk\n\n*Status: accepted · Date: 2026-01-02*\n\nBecause.\n",
    ],
    ids=["no status", "no date", "unknown status", "another number"],
)
def test_a_decision_without_its_number_status_and_date_is_an_error(project: Path, text: str) -> None:
    decide(project, "0001-walk.md", text)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(project)
    assert "0001-walk.md does not begin with its number" in caught.value.stderr
