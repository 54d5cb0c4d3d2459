"""Engine plugins: an entry point of the group `gpuyard.engines`, loaded by the real daemon."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import end_leftovers

ROOT = Path(__file__).parents[2]
# An engine that runs processes on this machine, with short waits.
MINE = """
from gpuyard.engines.cluster import engine as cluster_engine
from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.engines.open_cluster_engine import Context
from gpuyard.ports import Engine
from tests.fakes.site import ProcessSite

def open_mine(context: Context) -> Engine:
    cluster_engine._FIRST_PAUSE_S = cluster_engine._SOON_S = cluster_engine._TICK_S = 0.05
    return ClusterEngine(ProcessSite(), context.folder, context.on_news, poll_s=0.2)
"""
BROKEN = "import a_package_that_is_not_there"
CROOKED = """
def open_crooked(context):
    return {}["nothing"]
"""
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with an engine of that name."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")

    def put(name: str, content: str, opener: str) -> None:
        (folder / f"engine_of_{name}.py").write_text(content)
        about = folder / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[gpuyard.engines]\n{name} = engine_of_{name}:{opener}\n")

    return put


@pytest.fixture(autouse=True)
def queue(own_home: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    yield
    end_leftovers(own_home)


def submit(*arguments: str) -> str:
    result = run("submit", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


def test_an_installed_engine_plugin_runs_jobs(install: Install) -> None:
    install("mine", MINE, "open_mine")
    job_id = submit("--engine", "mine", "--", "sh", "-c", "echo hello from $GPUYARD_JOB_ID")
    assert run("wait", job_id).returncode == 0
    assert run("logs", job_id).stdout == f"hello from {job_id}\n"
    job = json.loads(run("show", job_id, "--json").stdout)
    assert (job["state"], job["engine"]) == ("succeeded", "mine")
    assert job["place"] in ("here", os.uname().nodename), "as the site says, or as the node does"


def test_a_broken_engine_plugin_is_listed_and_affects_nothing_else(install: Install) -> None:
    install("broken", BROKEN, "open_broken")
    install("crooked", CROOKED, "open_crooked")
    broken, crooked = (submit("--engine", name, "--", "true") for name in ("broken", "crooked"))
    here = submit("--", "true")
    assert run("wait", here).returncode == 0
    assert "ModuleNotFoundError: No module named 'a_package_that_is_not_there'" in run("why", broken).stdout
    assert "the engine crooked cannot be opened: KeyError: 'nothing'" in run("why", crooked).stdout
    assert json.loads(run("show", broken, "--json").stdout)["state"] == "queued"
    doctor = run("doctor", "--json")
    assert doctor.returncode == 1
    report = json.loads(doctor.stdout)
    problems = {each["name"]: each["problem"] for each in report["engines"]}
    assert "a_package_that_is_not_there" in problems["broken"]
    assert problems["crooked"] is None, "it loads; that it cannot be opened is reported when it is used"
    assert [each for each in report["advice"] if "broken" in each]


def test_an_unknown_engine_is_refused_with_a_list_of_the_known_ones(install: Install) -> None:
    install("mine", MINE, "open_mine")
    refused = run("submit", "--engine", "nowhere", "--", "true")
    assert refused.returncode == 2
    assert "there is no engine 'nowhere'" in refused.stderr
    assert "local, slurm, ray, mine" in refused.stderr
