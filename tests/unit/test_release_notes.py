"""`scripts/release-notes`: the tag must name the version, and the notes come from the changelog."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/release-notes"
CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.2.3] - 2026-11-20

### Added

- A verb.

## 1.2.30, unreleased

- Another.

[1.2.3]: https://example.org/1.2.3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/release-notes").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "src/gpuyard").mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def notes(project: Path, version: str, tag: str) -> "subprocess.CompletedProcess[str]":
    (project / "src/gpuyard/version.py").write_text(f'__version__ = "{version}"\n')
    command = [sys.executable, str(project / "scripts/release-notes"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "expected"), [("1.2.3", "### Added\n\n- A verb.\n"), ("1.2.30", "- Another.\n")])
def test_a_release_has_the_notes_of_its_version(project: Path, version: str, expected: str) -> None:
    ran = notes(project, version, f"v{version}")
    assert (ran.returncode, ran.stdout) == (0, expected)


def test_a_wrong_tag_or_version_is_refused(project: Path) -> None:
    ran = notes(project, "1.2.30", "v1.2.3")
    assert ran.returncode == 1, "a tag that differs from the version is refused"
    assert "the tag is v1.2.3, and src/gpuyard/version.py says 1.2.30" in ran.stderr
    ran = notes(project, "1.2.4", "v1.2.4")
    assert ran.returncode == 1
    assert "CHANGELOG.md has no section for 1.2.4" in ran.stderr, "a version missing in the changelog is refused"
