"""For any output of a tool, its parser returns valid devices or raises a ProbeError, nothing else."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuyard.errors import ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Reading
from gpuyard.probes.local_machine import TOOLS, find_parser
from tests.scale import size
from tests.unit.probes import samples_amd, samples_apple, samples_intel, samples_nvidia

SYNTHETIC = {**samples_nvidia.SAMPLES, **samples_amd.SAMPLES, **samples_intel.SAMPLES, **samples_apple.SAMPLES}
REAL_FOLDER = Path(os.environ.get("GPUYARD_SAMPLES", "/nonexistent"))
FIGURES = (
    "memory_total_mb", "memory_used_mb", "memory_free_mb", "utilization_percent", "power_draw_w", "power_limit_w",
    "temperature_c",
)  # fmt: skip
NASTY = st.sampled_from(
    ["", "0", "-1", "NaN", "1e999", "9" * 400, "[N/A]", "N/A", '"', "{", "}", "[", "]", "<", ">", ",", "\x00", "\n",
     "é", "\ufffd", "null", "true", '{"value": {"value": 1}}', "GPU is lost", "[" * 200, "&amp;", "&x;", "%", "#"]
)  # fmt: skip

OTHER_TEXTS = (
    "", "\0", "# A README\n\nGPU: yes\nIt reads the GPU Power: 5 mW of a Mac.\n", "ERROR:root:Driver not initialized\n",
    '{"error": "no", "code": -1}', '[{"devices": []}]', "[1, 2", "<plist", "GPU  POWER  SCLK  GPU%\n",
    '<?xml version="1.0"?><other_log><gpu/></other_log>',
)  # fmt: skip


def seeds(tool: str) -> list[str]:
    real = [path.read_text(errors="replace") for path in sorted(REAL_FOLDER.glob(f"{tool}/*.txt"))]
    return [*SYNTHETIC[tool], *real]


@st.composite
def mutated(draw: st.DrawFn, tool: str) -> str:
    """Return a sample with a few parts cut, doubled, replaced or taken from another sample."""
    samples = seeds(tool)
    text = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 5, 20, 200, 10**6])))
        other = draw(st.sampled_from(samples))
        piece = draw(NASTY | st.text(max_size=8) | st.just(text[start:end] * 2) | st.just(other[start:end]))
        text = text[:start] + piece + text[end:]
    return text


def check(tool: str, text: str) -> None:
    try:
        reading = find_parser(tool)(text)
    except ProbeError:
        return
    assert isinstance(reading, Reading)
    ids = [device.id for device in reading.devices]
    assert len(set(ids)) == len(ids)
    for device in reading.devices:
        assert device.id
        for name in FIGURES:
            value = getattr(device, name)
            assert value is None or math.isfinite(value), name
            assert value is None or value >= 0 or name == "temperature_c", name
        for process in device.processes or ():
            assert process.pid >= 0
            assert process.memory_mb is None or 0 <= process.memory_mb < math.inf


@pytest.mark.parametrize("tool", TOOLS)
def test_other_text_is_refused_with_a_message_of_one_line(tool: str) -> None:
    vendors = {name: samples for name, samples in SYNTHETIC.items() if not name.startswith(tool.partition("-")[0])}
    for text in (*OTHER_TEXTS, *(sample for samples in vendors.values() for sample in samples)):
        with pytest.raises(ProbeGarbled) as caught:
            find_parser(tool)(text)
        assert tool.startswith(caught.value.source)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=size(30, full=150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_output_gives_devices_or_a_probe_error(tool: str, data: st.DataObject) -> None:
    check(tool, data.draw(mutated(tool)))


@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=size(15, full=50), deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_gives_devices_or_a_probe_error(tool: str, text: str) -> None:
    check(tool, text)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "opening", ["[", "{", '{"a":', "<a>", '{"card0":', '{"gpu_data": [', "(", '"PerformanceStatistics" = {']
)
def test_very_deep_nesting_is_refused(tool: str, opening: str) -> None:
    check(tool, opening * 50_000)
