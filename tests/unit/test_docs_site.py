"""`scripts/docs-site`: pages that are written for GitHub become pages of the docs site."""

import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "scripts/docs-site"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with a copy of the script."""
    add(tmp_path, SCRIPT, (Path(__file__).parents[2] / SCRIPT).read_text(encoding="utf-8"))
    add(tmp_path, "README.md", "[guide](docs/how-to/queue.md)\n")
    add(tmp_path, "docs/how-to/queue.md", "# Queue\n")
    add(tmp_path, "docs/adr/index.md", "# Decisions\n")
    add(tmp_path, "docs/images/page.png", "")
    add(tmp_path, "src/code.py", "")
    return tmp_path


def add(project: Path, name: str, text: str) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text(text, encoding="utf-8")


def problems(project: Path, step: str) -> str:
    """Run one step of the script. Return its error messages, "" if it succeeds."""
    command = [sys.executable, str(project / SCRIPT), step]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(done.stderr), done
    return done.stderr


def prepared(project: Path, page: str) -> str:
    assert problems(project, "prepare") == ""
    return (project / "build/docs" / page).read_text(encoding="utf-8")


def test_links_are_adapted_to_the_site(project: Path) -> None:
    unchanged = ["[mail](mailto:a@b.c), [web](https://a.b/c#d), [here](#d)", "```python\ncalls[0](event)\n```"]
    changed = {
        "[a](docs/how-to/queue.md#submit)": "[a](../how-to/queue.md#submit)",
        "[decisions](docs/adr/)": "[decisions](../adr/index.md)",
        "![page](docs/images/page.png)": "![page](../images/page.png)",
        "[itself](CONTRIBUTING.md)": "[itself](contributing.md)",
        "[two\nlines](docs/adr/index.md)": "[two\nlines](../adr/index.md)",
        "[code](src/code.py) and a [folder](src/)": "code and a folder",
        "| `start\\|stop` | a \\| b |": "| `start|stop` | a \\| b |",
    }
    add(project, "CONTRIBUTING.md", "\n".join([*unchanged, *changed]))
    assert prepared(project, "project/contributing.md") == "\n".join([*unchanged, *changed.values()])
    # A page in docs can link to pages outside of docs.
    add(project, "SECURITY.md", "# Security\n")
    add(project, "docs/how-to/queue.md", "[who may](../../SECURITY.md), [why](../adr/index.md)\n")
    assert prepared(project, "how-to/queue.md") == "[who may](../project/security.md), [why](../adr/index.md)\n"


def test_the_site_has_no_internals_and_shows_links_to_them_as_text(project: Path) -> None:
    add(project, "docs/internals/tests.md", "[gone](gone.md)\n")
    assert problems(project, "prepare") == "docs: docs/internals/tests.md: gone.md does not exist\n"
    add(project, "docs/internals/tests.md", "[queue](../how-to/queue.md)\n")
    add(project, "CONTRIBUTING.md", "[faults](docs/internals/tests.md#faults)\n")
    assert prepared(project, "project/contributing.md") == "faults\n"
    assert not (project / "build/docs/internals").exists()


def test_links_to_missing_files_and_images_are_problems(project: Path) -> None:
    for page in ("README.md", "ARCHITECTURE.md", "docs/how-to/queue.md"):
        add(project, page, "[gone](gone.md)\n")
    add(project, "docs/adr/index.md", "![gone](gone.png)\n")
    assert problems(project, "prepare").splitlines() == [
        "docs: docs/adr/index.md: gone.png does not exist",
        "docs: docs/how-to/queue.md: gone.md does not exist",
        "docs: ARCHITECTURE.md: gone.md does not exist",
        "docs: README.md: gone.md does not exist",
    ]
    # A missing image is a problem.
    add(project, "src/logo.png", "")
    add(project, "ARCHITECTURE.md", "![logo](src/logo.png)\n")
    assert "ARCHITECTURE.md: the image src/logo.png is not in docs/" in problems(project, "prepare")


def test_diagrams_become_tables(project: Path) -> None:
    diagram = (
        "stateDiagram-v2\n    held --> queued: release\n    held --> cancelled: cancel, stop\n    cancelled --> [*]"
    )
    add(project, "ARCHITECTURE.md", f"# Life\n\n```mermaid\n{diagram}\n```\n\nend\n")
    page = prepared(project, "architecture.md")
    assert "| **held** | queued (release), cancelled (cancel, stop) |\n\nend" in page
    assert "mermaid" not in page, "a state diagram is shown as a table"
    # A diagram that the site cannot show is a problem.
    add(project, "docs/how-to/queue.md", "```mermaid\ngraph TD\n    a --> b: c\n```\n")
    assert "docs/how-to/queue.md: the site can show no diagram" in problems(project, "prepare")


def build(project: Path, page: str) -> None:
    """Write a site of two pages, the first with a navigation."""
    link = '<a class="md-nav__link" href="{}">x</a>'
    add(project, "site/index.html", "".join(map(link.format, ["", "#top", "./how-to/queue/"])))
    add(project, "site/how-to/queue/index.html", page)


def test_an_entry_of_the_navigation_without_a_page_is_a_problem(project: Path) -> None:
    build(project, "")
    (project / "site/how-to/queue/index.html").unlink()
    assert problems(project, "check") == "docs: how-to/queue does not exist: remove it from nav in zensical.toml\n"


def test_a_built_site_is_checked(project: Path) -> None:
    assert "run make docs" in problems(project, "check"), "a site that was not built is a problem"
    build(project, '<script src="../../app.js"></script><a href="https://a.b/">elsewhere</a>')
    assert problems(project, "check") == "", "a site with a complete navigation and local files only passes"
    # A page that loads from another host is a problem.
    build(project, '<script src="https://a.b/x.js"></script><link href="//a.b/x.css"><img src="http://a.b/x.png">')
    output = problems(project, "check")
    for address in ("https://a.b/x.js", "//a.b/x.css", "http://a.b/x.png"):
        assert f"docs: how-to/queue loads {address}: " in output
    # A page that is not in the navigation is a problem.
    build(project, "")
    add(project, "site/lost/index.html", "")
    assert problems(project, "check") == "docs: lost is not in the navigation: add it to nav in zensical.toml\n"


def test_the_property_list_for_launchd_keeps_a_daemon_running_and_leaves_its_jobs_alone() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/macos.md").read_text(encoding="utf-8")
    agent = plistlib.loads(page.partition("```xml\n")[2].partition("```")[0].encode())
    assert agent["ProgramArguments"][1:] == ["daemon", "run"]
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["AbandonProcessGroup"] is True
