"""What `gpuyard doctor --engine` says about a node, from what a job printed there."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.cluster import site_checks as node_check
from gpuyard.engines.cluster.site import ClusterNode, SiteUnreachable
from gpuyard.engines.cluster.site_checks import NodeReport, check_nodes

GOOD = ClusterNode(name="n0", place="n0")


class NodesHere:
    """A site whose nodes are this machine."""

    name = "slurm"

    def __init__(self, *nodes: ClusterNode, says: str | None = None) -> None:
        self._nodes = nodes
        self._says = says

    def nodes(self) -> list[ClusterNode]:
        return list(self._nodes)

    def run_on(self, node: ClusterNode, script: str, within_s: float) -> str:
        if node.name == "silent":
            raise SiteUnreachable("srun did not answer within 80 s", hint="`scontrol ping`")
        script = script if self._says is None else f"{script.partition('; GPUYARD')[0]}; echo '{self._says}'"
        environment = {"PATH": os.environ["PATH"]}
        ran = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
        return ran.stdout


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")


def problems_at(folder: Path, site: NodesHere, *, cwd: str = "/", card_mb: float | None = None) -> list[str]:
    [check] = check_nodes(lambda: site, folder, cwd, card_mb)
    return list(check.problems)


def report(**fields: object) -> str:
    values = {"at": time.time(), "has_cwd": True, **fields}
    return "report=" + msgspec.json.encode(msgspec.convert(values, NodeReport)).decode()


def test_a_node_without_problems(tmp_path: Path) -> None:
    [check] = check_nodes(lambda: NodesHere(GOOD), tmp_path / "shared", "/", 24000.0)
    assert check.problems == ()
    assert check.report is not None
    assert check.report.cards_mb == (24576.0, 24576.0)
    assert not list((tmp_path / "shared").iterdir()), "it leaves nothing behind"


def test_a_missing_working_directory_and_a_small_gpu(tmp_path: Path) -> None:
    assert problems_at(tmp_path, NodesHere(GOOD), cwd="/nowhere", card_mb=80000.0) == [
        "does not see the working directory /nowhere (submit from a folder that all nodes see)",
        "has a GPU of 24 GB, but `gpu_memory` in [slurm] is 78.1 GB: lower that",
    ]


@pytest.mark.parametrize(("off_s", "words"), [(600.0, "10m ahead of"), (-600.0, "10m behind")])
def test_a_wrong_clock(tmp_path: Path, off_s: float, words: str) -> None:
    [problem] = problems_at(tmp_path, NodesHere(GOOD, says=report(at=time.time() + off_s)))
    assert re.sub(r"(9m 59s|10m) ", "10m ", problem) == f"its clock is {words} this machine's: set it by NTP"


def test_a_python_that_cannot_be_run(tmp_path: Path) -> None:
    [problem] = problems_at(tmp_path, NodesHere(GOOD, says="sh: 1: not found"))
    assert problem.startswith(f"cannot run {sys.executable}: sh: 1: not found (install gpuyard")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = node_check._script
    monkeypatch.setattr(node_check, "_script", lambda *each: script(*each).replace("written-", "no/"))
    [problem] = problems_at(tmp_path, NodesHere(GOOD))
    assert problem.startswith(f"cannot write to {tmp_path} (mount it for writing")


def test_nodes_that_run_nothing(tmp_path: Path) -> None:
    down = ClusterNode(name="n1", place="n1", trouble="Slurm says that it is down")
    silent = ClusterNode(name="silent", place="n2")
    checks = check_nodes(lambda: NodesHere(down, silent), tmp_path, "/", None)
    assert [each.problems for each in checks] == [
        ("Slurm says that it is down",),
        ("no job ran there: srun did not answer within 80 s (`scontrol ping`)",),
    ]
