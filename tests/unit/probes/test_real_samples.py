"""Real outputs of the vendors' tools, if GPUYARD_SAMPLES names a folder with them: TOOL/name.txt.

The expected devices were read by eye. A file without expected devices must at least parse, unless it has another form
than the probes ask the tool for.
"""

import os
from pathlib import Path

import pytest

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Device
from gpuyard.probes.local_machine import TOOLS, replay
from tests.unit.probes.expected_devices import EXPECTED

FOLDER = Path(os.environ.get("GPUYARD_SAMPLES", "/nonexistent"))
OTHER_FORMS = {
    "amd-smi/amd-smi-metric-power-text.txt", "amd-smi/amd-smi-monitor-ptv__mi300-cpx32.txt",
    "nvidia-smi-csv/query-gpu-csv-noheader-nounits__all-NA.txt",
    "nvidia-smi-csv/query-gpu-csv-noheader-nounits__util-NA-a100-mig.txt",
    "powermetrics/powermetrics-text-all__powermetrics-tui.txt",
    "powermetrics/powermetrics-text__Mac13,1-m1max-macos14.txt",
    "powermetrics/powermetrics-text__Macmini9,1-m1-loaded.txt",
    "powermetrics/powermetrics-text__powermetrics-go.txt", "rocm-smi/rocm-smi-table__mi300x4.txt",
    "xpu-smi/xpu-smi-ps.txt", "xpu-smi/xpu-smi-stats__table.txt", "xpu-smi/xpumcli-dump__tile-blank-field.txt",
}  # fmt: skip
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.txt"))
# The tool may print an error instead of either.
ERRORS_OF = {"nvidia-smi-error": ("nvidia-smi-xml", "nvidia-smi-csv", "nvidia-smi-apps")}


def tools_of(file: str) -> tuple[str, ...]:
    folder = file.partition("/")[0]
    return ERRORS_OF.get(folder, (folder,))


CASES = [(tool, file) for file in FILES for tool in tools_of(file)]


def figure(device: Device, name: str) -> object:
    if name == "processes":
        return None if device.processes is None else [(process.pid, process.memory_mb) for process in device.processes]
    return getattr(device, name)


def nearly(value: object) -> object:
    """Return a value to compare with: figures may be rounded, everything else must be equal."""
    if isinstance(value, list):
        return [(pid, nearly(memory)) for pid, memory in value]
    return pytest.approx(value, abs=0.011) if isinstance(value, int | float) else value


@pytest.mark.skipif(not FILES, reason="GPUYARD_SAMPLES names no folder of real outputs")
@pytest.mark.parametrize(("tool", "file"), CASES)
def test_a_real_output_gives_the_expected_devices(tool: str, file: str) -> None:
    if file in OTHER_FORMS:
        with pytest.raises(ProbeGarbled):
            replay(tool, (FOLDER / file).read_bytes())
        return
    devices = replay(tool, (FOLDER / file).read_bytes()).devices
    if file not in EXPECTED:
        return
    assert len(devices) == len(EXPECTED[file])
    for device, expected in zip(devices, EXPECTED[file], strict=True):
        for name, value in expected.items():
            assert figure(device, name) == nearly(value), name


@pytest.mark.skipif(not FILES, reason="GPUYARD_SAMPLES names no folder of real outputs")
def test_every_tool_has_an_output_with_expected_devices() -> None:
    assert {file.partition("/")[0] for file in EXPECTED if file in FILES} - set(ERRORS_OF) == set(TOOLS)
