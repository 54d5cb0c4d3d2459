"""The package as users get it: build a source distribution, a wheel from it, and use the wheel in an empty environment.

Nothing is downloaded: the dependencies are linked from the environment of the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from gpuyard.version import __version__
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.usefixtures("unmeasured")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
PACKAGES = ("gpuyard", "gpu_scheduler")
DATA = {".css", ".html", ".js", ".py", ".sh", ".sql", ".typed", ".yml"}


class Built(NamedTuple):
    sdist: Path
    wheel: Path


class Environment(NamedTuple):
    """A virtual environment with the wheel and its dependencies only."""

    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program("gpuyard"), *arguments],
            cwd=cwd or self.folder,
            env=environment_variables(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def link_distributions(folder: Path, distributions: Iterable[str]) -> None:
    """Create links to these distributions in a folder that is on the path of an environment."""
    for each in map(metadata.distribution, distributions):
        for top in {file.parts[0] for file in each.files or () if file.parts[0] != ".."}:
            if not os.path.lexists(folder / top):
                (folder / top).symlink_to(str(each.locate_file(top)))


def environment_variables() -> dict[str, str]:
    """Return our environment variables without those by which a program would find this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def build(source: Path, kind: str, into: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    [made] = [path for path in into.iterdir() if path.suffix == (".gz" if kind == "sdist" else ".whl")]
    return made


def needed_by(requirements: Iterable[str], extra: str = "") -> set[str]:
    """Return the names of all installed distributions that these requirements need, including indirect ones."""
    found: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for each in requirement.extras or {""}:
            found |= needed_by(metadata.requires(requirement.name) or (), each)
        found.add(requirement.name)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    sdist = build(ROOT, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Built(sdist, build(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", str(built.wheel)], check=True, timeout=DEADLINE_S
    )
    (folder / "lent").mkdir()
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{folder / 'lent'}\n")
    with zipfile.ZipFile(built.wheel) as wheel:
        about = wheel.read(f"gpuyard-{__version__}.dist-info/METADATA").decode()
    link_distributions(folder / "lent", needed_by(re.findall(r"^Requires-Dist: (.+)$", about, re.MULTILINE)))
    return Environment(folder)


def test_the_wheel_contains_every_file_of_the_packages_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(ROOT / "src"))
        for package in PACKAGES
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file()
        and not _is_left_by_tools(path.relative_to(ROOT))
        and path.name not in {"ruff.toml", "README.md"}
    }
    assert names == there
    assert {Path(name).suffix for name in names} == DATA


def _is_left_by_tools(path: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def test_the_source_distribution_has_the_files_that_packagers_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".git/", ".venv")) or "__pycache__" in name]


def test_the_wheel_installs_the_commands(installed: Environment) -> None:
    assert installed.run("--version").stdout == f"gpuyard {__version__}\n"
    where = subprocess.run(
        [installed.program("python"), "-c", "import gpuyard, gpu_scheduler; print(gpuyard.__file__)"],
        cwd=installed.folder, env=environment_variables(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(installed.folder)
    assert os.access(installed.program("setup_workspace.sh"), os.X_OK)
    assert os.access(installed.program("scheduler_main.sh"), os.X_OK)
    assert "uninstall" in installed.run("--help").stdout


def test_a_job_runs_and_the_page_is_served(installed: Environment, home: Path) -> None:
    submitted = installed.run("submit", "--vram", "1G", "--", "echo", "from the wheel")
    assert (submitted.returncode, submitted.stdout) == (0, "1\n"), submitted.stderr
    assert installed.run("wait").returncode == 0
    assert installed.run("logs", "1").stdout == "from the wheel\n"

    page = json.loads(installed.run("web", "--port", "0", "--json").stdout)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    origin = f"http://127.0.0.1:{page['port']}"
    with opener.open(page["url"], timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    files = re.findall(r'(?:src|href)="(/static/[^"]+)"', text)
    assert any(name.endswith(".js") for name in files)
    assert any(name.endswith(".css") for name in files)
    for name in files:
        with opener.open(origin + name, timeout=DEADLINE_S) as answer:
            assert answer.status == 200
            assert answer.read() == (ROOT / "src/gpuyard/ui/web" / name.removeprefix("/static/")).read_bytes()


def test_a_workspace_is_made_from_its_templates(installed: Environment, tmp_path: Path) -> None:
    result = installed.run("workspace", "init", str(tmp_path / "sweep"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "sweep/scheduler_config.yml").exists()


def test_a_workspace_of_manually_copied_templates_works(installed: Environment, tmp_path: Path) -> None:
    [templates] = installed.folder.glob("lib/python*/site-packages/gpuyard/recipes/workspace")
    shutil.copy(templates / "scheduler_config_template.yml", tmp_path / "scheduler_config.yml")
    shutil.copy(templates / "scheduler_wrapper_template.sh", tmp_path / "scheduler.sh")
    result = subprocess.run(
        [tmp_path / "scheduler.sh", "config"], env={**environment_variables(), "PATH": f"{installed.folder}/bin:/bin"},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "max_jobs_per_gpu" in result.stdout


def test_render_without_its_extra_prints_the_install_command(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"scene": "room.ply", "labels": ["front"]}')
    result = installed.run("render", "manifest.json", "--renderer", "mine:render", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("gpuyard: numpy is not installed: it comes with gpuyard's extra `render`\n")
    assert re.search(
        rf"  install it with: {installed.program('python')} -m pip install '.*\[render\]'\n", result.stderr
    )


def test_top_names_its_missing_dependency_and_starts_once_it_is_installed(
    installed: Environment, home: Path, tmp_path: Path
) -> None:
    without = Terminal([installed.program("gpuyard"), "top"], {})
    status, output = without.end()
    without.close()
    assert status == 1
    assert "`gpuyard top` needs textual, which gpuyard's extra `top` installs" in output
    assert "[top]'" in output

    link_distributions(tmp_path, needed_by(["textual"]))
    size = {"COLUMNS": "100", "LINES": "30"}
    screen = Terminal([installed.program("gpuyard"), "top"], {**size, "PYTHONPATH": str(tmp_path)})
    try:
        screen.read_until("Simulated 24 GB")
        screen.type("q")
        assert screen.end()[0] == 0
    finally:
        screen.close()
