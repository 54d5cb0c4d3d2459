"""`amd-smi`, `rocm-smi` and `radeontop` as processes: stand-ins on PATH that print, fail, hang or never end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeGarbled, ProbeTimeout
from gpuyard.probes.amd.amd_smi import AmdSmi
from gpuyard.probes.amd.radeontop import RadeonTop
from gpuyard.probes.amd.rocm_smi import RocmSmi
from gpuyard.probes.run_tool import Backoff
from tests.executables import write_executable
from tests.in_time import in_time
from tests.unit.probes.samples_amd import (
    AMD_SMI_LIST,
    AMD_SMI_METRIC,
    AMD_SMI_METRIC_BARE,
    AMD_SMI_PROCESS,
    AMD_SMI_STATIC,
    RADEONTOP,
)
from tests.unit.probes.samples_rocm import ROCM_SMI_JSON

PutTool = Callable[[str, str], None]
HANG = "exec sleep 600"


@pytest.fixture
def put_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutTool:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(name: str, script: str) -> None:
        tool = tmp_path / name
        write_executable(tool, f"#!/bin/sh\ncd '{tmp_path}' || exit 9\n{script}\n")

    return put


class AmdSmiStandIn:
    """An `amd-smi` that answers each command with a script, and records its calls."""

    def __init__(self, folder: Path, put: PutTool) -> None:
        self._folder = folder
        self._put = put
        self._scripts: dict[str, str] = {}
        for command, text in (
            ("metric", AMD_SMI_METRIC),
            ("list", AMD_SMI_LIST),
            ("static", AMD_SMI_STATIC),
            ("process", AMD_SMI_PROCESS),
        ):
            self.prints(command, text)

    def prints(self, command: str, text: str) -> None:
        (self._folder / f"{command}.txt").write_text(text)
        self.does(command, f"cat {command}.txt")

    def does(self, command: str, script: str) -> None:
        self._scripts[command] = script
        cases = "\n".join(f"{name}) {body} ;;" for name, body in self._scripts.items())
        self._put("amd-smi", f'echo "$*" >> calls\ncase "$1" in\n{cases}\nesac')

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self._folder / "calls").read_text().splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path, put_tool: PutTool) -> AmdSmiStandIn:
    return AmdSmiStandIn(tmp_path, put_tool)


def test_amd_smi_joins_figures_ids_names_and_processes_and_asks_for_ids_and_names_once(stand_in: AmdSmiStandIn) -> None:
    probe = AmdSmi()
    reading = probe.read(10)
    first, second = reading.devices
    assert (first.id, first.name, first.power_draw_w) == ("GPU-a1b2c3d4e5f60718", "Instinct Example", 205.0)
    assert first.processes is not None
    assert [process.pid for process in first.processes] == [4321]
    assert (second.id, second.processes) == ("0000:26:00.0", ())
    assert reading.problems == ()
    assert probe.read(10) == reading
    assert stand_in.calls() == ["list", "metric", "static", "process", "metric", "process"]


def test_amd_smi_queries_ids_and_names_again_after_renumbering(stand_in: AmdSmiStandIn) -> None:
    probe = AmdSmi()
    probe.read(10)
    stand_in.prints("metric", AMD_SMI_METRIC_BARE)
    stand_in.prints("list", '[{"gpu": 0, "bdf": "0000:26:00.0", "uuid": "N/A"}]')
    stand_in.prints("static", '[{"gpu": 0, "asic": {"market_name": "The other one"}}]')
    (device,) = probe.read(10).devices
    assert (device.id, device.name) == ("0000:26:00.0", "The other one")


@pytest.mark.parametrize(
    ("command", "script", "kind"),
    [
        ("process", "echo 'Permission denied' >&2; exit 10", "denied"),
        ("process", "echo nonsense", "garbled"),
        ("static", "echo boom >&2; exit 3", "crashed"),
    ],
)
def test_a_failed_command_keeps_figures_of_others(
    stand_in: AmdSmiStandIn, command: str, script: str, kind: str
) -> None:
    stand_in.does(command, script)
    reading = AmdSmi().read(10)
    assert [device.id for device in reading.devices] == ["GPU-a1b2c3d4e5f60718", "0000:26:00.0"]
    (problem,) = reading.problems
    assert (problem.source, problem.kind) == ("amd-smi", kind)
    assert command in problem.message
    assert (reading.devices[0].processes is None) == (command == "process")


def test_failed_commands_are_run_again(stand_in: AmdSmiStandIn) -> None:
    stand_in.does("static", "exit 3")
    probe = AmdSmi()
    assert probe.read(10).devices[0].name is None
    stand_in.prints("static", AMD_SMI_STATIC)
    assert probe.read(10).devices[0].name == "Instinct Example"
    stand_in.does("list", "echo 'no driver' >&2; exit 4")
    with pytest.raises(ProbeCrashed, match="no driver"):
        AmdSmi().read(10)


def test_amd_smi_without_options_for_single_metrics_is_called_for_all_metrics(stand_in: AmdSmiStandIn) -> None:
    stand_in.does("metric", 'test "$*" = "metric --json" || exit 2; cat metric.txt')
    assert AmdSmi().read(10).devices[0].power_draw_w == 205.0


def test_a_read_that_timed_out_keeps_its_partial_results_for_the_next(stand_in: AmdSmiStandIn) -> None:
    probe = AmdSmi()
    stand_in.does("metric", HANG)
    with pytest.raises(ProbeTimeout):
        probe.read(1)
    stand_in.prints("metric", AMD_SMI_METRIC)
    assert probe.read(10).devices[0].id == "GPU-a1b2c3d4e5f60718"
    assert stand_in.calls().count("list") == 1


def test_the_calls_of_one_read_share_its_time(stand_in: AmdSmiStandIn) -> None:
    stand_in.does("static", HANG)
    reading = in_time(4.0, lambda: AmdSmi().read(1.5))
    assert [problem.kind for problem in reading.problems] == ["timeout", "timeout"]
    assert reading.devices[0].power_draw_w == 205.0


@pytest.mark.parametrize("command", ["static", "process"])
def test_a_command_that_hangs_does_not_slow_the_next_reading(
    stand_in: AmdSmiStandIn, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "is_resting", lambda self, now: self._failures > 0)  # however long this machine takes
    stand_in.does(command, HANG)
    probe = AmdSmi()
    probe.read(1.5)
    reading = in_time(9.0, lambda: probe.read(10.0))
    assert [command in problem.message for problem in reading.problems] == [True]
    assert (reading.devices[0].processes is None) == (command == "process")
    assert (reading.devices[0].name is None) == (command == "static")


def test_the_output_of_rocm_smi_counts_despite_an_error_status(put_tool: PutTool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(ROCM_SMI_JSON)
    put_tool("rocm-smi", 'echo "$*" > calls; cat out; echo "one figure is not supported" >&2; exit 2')
    (device,) = RocmSmi().read(10).devices
    assert device.id == "GPU-01a2b3c4d5e6f708"
    asked = (tmp_path / "calls").read_text().split()
    assert {"--showuniqueid", "--showbus", "--showmeminfo", "--showpids", "--json"} <= set(asked)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'Driver not initialized (amdgpu not found in modules)'; exit 1", ProbeCrashed),
        ("echo 'Permission denied: /dev/kfd'; exit 1", ProbeDenied),
        ("echo 'Driver not initialized (amdgpu not found in modules)'", ProbeGarbled),
        ("", ProbeGarbled),
    ],
)
def test_rocm_smi_that_prints_no_cards_is_an_error(put_tool: PutTool, script: str, error: type[ProbeError]) -> None:
    put_tool("rocm-smi", script)
    with pytest.raises(error):
        RocmSmi().read(10)


def test_radeontop_is_ended_after_one_sample(put_tool: PutTool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(RADEONTOP)
    put_tool("radeontop", f"cat out\n{HANG}")
    (device,) = in_time(10.0, lambda: RadeonTop().read(200)).devices
    assert device.utilization_percent == 12.5
