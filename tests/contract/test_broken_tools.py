"""However a vendor's tool fails, a snapshot arrives in time, with the host's figures and the tool's name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.probes.local_machine import local_machine, local_probes
from tests.in_time import in_time
from tests.unit.probes.samples_rocm import ROCM_SMI_JSON

Tools = Callable[[str, str], Path]
DEADLINE_S = 1.0
# A deadline that a working tool always meets, however slow the machine is.
LONG_S = 60.0
# On a busy machine this process may read the clock some time after the deadline.
SLACK_S = 0.5

VENDOR_TOOLS = {
    "nvidia-smi": "nvidia", "amd-smi": "amd", "rocm-smi": "amd", "radeontop": "amd", "intel_gpu_top": "intel",
    "xpu-smi": "intel", "powermetrics": "apple", "ioreg": "apple",
}  # fmt: skip
BROKEN = {
    "hung": ("import signal, subprocess\nsubprocess.Popen(['sleep', '600'])\nsignal.pause()", {"timeout"}),
    "crashing": ("import os; os.abort()", {"crashed"}),
    "failing": ("import sys; print('it is all wrong'); sys.exit(3)", {"crashed"}),
    "refused": ("import sys; sys.exit('you must be root: Permission denied')", {"denied"}),
    "printing garbage": ("print('\\x00\\xff{{{<gpu>[}] lorem, ipsum' * 50)", {"garbled"}),
    "silent": ("", {"garbled"}),
}


@pytest.fixture(autouse=True)
def only_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Tools) -> None:
    """Hide the tools of this machine: only those of the test are on PATH."""
    (tmp_path / "tools" / "sleep").symlink_to("/bin/sleep")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))


def snapshot_in_time(deadline_s: float = DEADLINE_S) -> Snapshot:
    """Return a snapshot within the deadline. A working tool answers long before `LONG_S`."""
    bound_s = DEADLINE_S if deadline_s == LONG_S else deadline_s
    # A new machine each time, because a machine remembers which probes were late.
    return in_time(bound_s + SLACK_S, lambda: local_machine(deadline_s).snapshot())


@pytest.mark.parametrize("tool", VENDOR_TOOLS)
@pytest.mark.parametrize("failure", BROKEN)
def test_a_broken_tool_costs_nothing_but_its_own_figures(tools: Tools, tool: str, failure: str) -> None:
    script, kinds = BROKEN[failure]
    tools(tool, script)
    snapshot = snapshot_in_time(DEADLINE_S if failure == "hung" else LONG_S)
    assert snapshot.host.memory_total_mb is not None
    assert snapshot.host.cpu_percent is not None
    named = [problem for problem in snapshot.problems if tool in problem.source and problem.kind != "missing"]
    assert [problem.vendor for problem in named] == [VENDOR_TOOLS[tool]]
    assert named[0].kind in kinds


@pytest.mark.parametrize("kind", ["missing", "denied"])
def test_tools_that_are_missing_or_may_not_be_executed_are_named(tools: Tools, kind: str) -> None:
    for tool in VENDOR_TOOLS if kind == "denied" else ():
        tools(tool, "").chmod(0o644)
    snapshot = local_machine(LONG_S).snapshot()
    assert snapshot.host.memory_total_mb is not None
    texts = [str(problem) for problem in snapshot.problems if problem.kind == kind]
    assert [tool for tool in VENDOR_TOOLS if not any(tool in text for text in texts)] == []


def test_all_tools_hanging_at_once_take_no_longer_than_one(tools: Tools) -> None:
    for tool in VENDOR_TOOLS:
        tools(tool, BROKEN["hung"][0])
    snapshot = snapshot_in_time()
    assert snapshot.host.memory_total_mb is not None
    assert {problem.vendor for problem in snapshot.problems} == {"nvidia", "amd", "intel", "apple"}


def test_after_a_hung_tool_the_next_one_answers_in_the_same_snapshot(tools: Tools) -> None:
    tools("amd-smi", BROKEN["hung"][0])
    tools("rocm-smi", f"print({ROCM_SMI_JSON!r})")
    snapshot = snapshot_in_time(5 * DEADLINE_S)
    assert {device.vendor for device in snapshot.devices} == {"amd"}
    assert any(problem.source == "amd-smi" and problem.kind == "timeout" for problem in snapshot.problems)


def test_every_probe_has_a_unique_name_and_its_vendor() -> None:
    probes = [probe for chain in local_probes().values() for probe in chain]
    assert len({probe.name for probe in probes}) == len(probes)
    assert {vendor: {probe.vendor for probe in chain} for vendor, chain in local_probes().items()} == {
        vendor: {vendor} for vendor in local_probes()
    }
