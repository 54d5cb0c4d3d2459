"""gpuyard as a git submodule of another project: the installation command of the docs, and the import."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.integration.test_wheel import DEADLINE_S, ROOT, environment_variables, link_distributions, needed_by

pytestmark = pytest.mark.usefixtures("unmeasured")

PAGE = (ROOT / "docs/how-to/use-in-another-project.md").read_text()
FOLDER = "third_party/gpuyard"
# The tracked files that an installation needs.
FILES = (".gitignore", "__init__.py", "LICENSE", "README.md", "pyproject.toml", "src")
USES = """
import gpu_scheduler
with gpu_scheduler.GPUScheduler(num_gpus=1) as gpu_ids:
    print(gpu_ids, gpu_scheduler.__file__)
"""


def line(beginning: str) -> str:
    """Return the line of the docs that begins so, without its comment."""
    [found] = re.findall(rf"^({re.escape(beginning)}.*?)(?:  +#.*)?$", PAGE, re.MULTILINE)
    return str(found)


class Project:
    """A git repository with a virtual environment that has the dependencies of gpuyard, but not gpuyard."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self._variables = {
            **environment_variables(), "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}", "GPUYARD_SIMULATE": "2x24GB",
            "GIT_CONFIG_GLOBAL": str(home / "gitconfig"), "GIT_CONFIG_NOSYSTEM": "1",
            "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip
        (home / "gitconfig").write_text(
            '[user]\nname = Ada\nemail = ada@example.org\n[protocol "file"]\nallow = always\n'
        )
        folder.mkdir()
        self._make_environment()
        self.sh("git init --quiet; echo .venv > .gitignore; git add .; git commit --quiet -m 'a project'")

    def _make_environment(self) -> None:
        place = self.folder / ".venv"
        venv.create(place, symlinks=True)
        pip = place / "bin/pip"
        write_executable(pip, f'#!/bin/sh\nexec {sys.executable} -m pip --python {place}/bin/python "$@"\n')
        (place / "lent").mkdir()
        [packages] = place.glob("lib/python*/site-packages")
        (packages / "lent.pth").write_text(f"{place / 'lent'}\n")
        link_distributions(place / "lent", needed_by(["gpuyard", "hatchling"]) - {"gpuyard"})

    def run(self, script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["sh", "-ec", script], cwd=self.folder, env=self._variables, capture_output=True, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    def sh(self, script: str) -> str:
        done = self.run(script)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def python(self, code: str) -> str:
        (self.folder / "train.py").write_text(code)
        return self.sh("python train.py")


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository with the current content of this checkout."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    for name in FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def project(tmp_path: Path, own_home: Path, upstream: Path) -> Project:
    made = Project(tmp_path / "project", tmp_path)
    made.sh(f"cd {upstream}; git init --quiet; git add .; git commit --quiet -m upstream")
    return made


def add_submodule(project: Project, upstream: Path, folder: str) -> None:
    project.sh(line("git submodule add ").replace("GPUYARD_URL", str(upstream)).replace(FOLDER, folder))
    project.sh("git commit --quiet -m 'carry gpuyard'")


# The second directory has the name of the package and is in the first entry of sys.path.
@pytest.mark.parametrize("folder", [FOLDER, "gpu_scheduler"])
def test_one_command_installs_the_package_from_a_submodule(project: Project, upstream: Path, folder: str) -> None:
    add_submodule(project, upstream, folder)
    project.sh(line("pip install -e ").replace(FOLDER, folder))
    assert project.python(USES) == f"[0] {project.folder}/{folder}/src/gpu_scheduler/__init__.py\n"
    assert project.sh("command -v gpuyard; command -v setup_workspace.sh") == "".join(
        f"{project.folder}/.venv/bin/{name}\n" for name in ("gpuyard", "setup_workspace.sh")
    )
    assert project.sh("git status --porcelain --ignore-submodules=none") == "?? train.py\n"


@pytest.mark.parametrize("folder", [FOLDER, "gpu_scheduler"])
def test_a_sys_path_entry_suffices_for_the_import(project: Project, upstream: Path, folder: str) -> None:
    add_submodule(project, upstream, folder)
    entry = line("sys.path.insert(0, ").replace(FOLDER, folder)
    output = project.python(f"import sys\n{entry}\n{USES}")
    assert output == f"[0] {project.folder}/{folder}/src/gpu_scheduler/__init__.py\n"


@pytest.mark.parametrize("folder", ["gpu_scheduler", "gpuyard"])
def test_a_submodule_at_the_root_is_imported_without_an_installation(
    project: Project, upstream: Path, folder: str
) -> None:
    add_submodule(project, upstream, folder)
    code = f"from {folder} import GPUScheduler\n{USES}\nimport gpuyard; assert gpuyard.GPUScheduler is GPUScheduler\n"
    expected = f"[0] {project.folder}/{folder}/src/gpu_scheduler/__init__.py\n"
    assert project.python(code) == expected
    (project.folder / "experiments").mkdir()
    (project.folder / "experiments/train.py").write_text(code)
    assert project.sh("python -m experiments.train") == expected


@pytest.mark.parametrize("beginning", ["", "import sys\nsys.path.insert(0, 'gpu_scheduler/src')\n"])
def test_a_missing_dependency_is_named_with_the_command_that_installs_it(
    project: Project, upstream: Path, beginning: str
) -> None:
    add_submodule(project, upstream, "gpu_scheduler")
    (project.folder / ".venv/lent/msgspec").unlink()
    (project.folder / "train.py").write_text(f"{beginning}from gpu_scheduler import GPUScheduler\n")
    done = project.run("python train.py")
    command = f"{project.folder}/.venv/bin/python -m pip install -e {project.folder}/gpu_scheduler"
    last = f"ModuleNotFoundError: gpuyard needs msgspec, which is not installed: {command}"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (1, "", last)
    assert "No module named" not in done.stderr


def test_templates_copied_from_a_submodule_make_a_workspace(project: Project, upstream: Path) -> None:
    add_submodule(project, upstream, FOLDER)
    copies = re.findall(r"^cp third_party/.*$", PAGE, re.MULTILINE)
    assert len(copies) == 2
    project.sh("\n".join([line("pip install -e "), "mkdir sweep", *copies]))
    assert "max_jobs_per_gpu" in project.sh("sweep/scheduler.sh config")
