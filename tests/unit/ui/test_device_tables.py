from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.machine_snapshot import Device, Host, Problem, Process, Snapshot, Vendor
from gpuyard.probes.devices_and_processes import ProcessInfo
from gpuyard.ui.cli.text_table import spell
from gpuyard.ui.views import Frame
from gpuyard.ui.views.machine_tables import snapshot_lines

CARD = Device(
    id="GPU-a", vendor=Vendor.NVIDIA, index=0, name="NVIDIA Test", memory_total_mb=24576.0, memory_used_mb=12288.0,
    utilization_percent=37.0, power_draw_w=201.5, power_limit_w=350.0, temperature_c=61.0, processes=(Process(pid=1),),
)  # fmt: skip
BARE = Device(id="intel-0", vendor=Vendor.INTEL, index=0)
HOST = Host(name="box", cpu_count=8.0, cpu_percent=5.0, memory_total_mb=65536.0, memory_available_mb=32768.0)


def shown(
    *devices: Device, width: int = 80, height: int | None = None, problems: tuple[Problem, ...] = (), **extras: Any
) -> str:
    snapshot = Snapshot(taken_at=0.0, host=HOST, devices=devices, problems=problems)
    lines = snapshot_lines(snapshot, Frame(width=width, height=height), **extras)
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_all_figures_fit_into_80_columns_and_unknown_ones_are_dashes() -> None:
    text = shown(CARD)
    for figure in ("NVIDIA Test", "12/24 GB", "37%", "202/350 W", "61°C"):
        assert figure in text
    assert "RAM 32/64 GB" in text
    assert max(map(len, text.splitlines())) <= 80
    assert shown(BARE).splitlines()[-1].split() == ["0", "intel-0", "-", "-", "-", "-", "-", "-"]

    def row(at_least_mb: float) -> str:
        return shown(
            Device(id="a", vendor=Vendor.INTEL, memory_total_mb=16384.0, memory_used_at_least_mb=at_least_mb)
        ).splitlines()[-1]

    assert " >=6/16 GB " in row(6144.0)
    assert " -/16 GB " in row(0.0)


def test_a_bar_is_proportional_and_empty_or_full_only_if_the_memory_is() -> None:
    row = shown(CARD).splitlines()[-1]
    assert abs(row.count("█") - row.count("░")) <= 1 < row.count("█")
    little = Device(id="a", vendor=Vendor.AMD, memory_total_mb=1000.0, memory_used_mb=1.0)
    much = Device(id="b", vendor=Vendor.AMD, memory_total_mb=1000.0, memory_used_mb=999.0)
    first, second = shown(little, much).splitlines()[-2:]
    assert first.count("█") == 1
    assert second.count("░") == 1


def test_a_history_is_drawn_oldest_first_and_in_ascii_without_unicode() -> None:
    assert "▁▅█" in shown(CARD, history={"GPU-a": [0.0, 50.0, 100.0]}, width=120)
    text = spell(shown(CARD, history={"GPU-a": [0.0, 50.0, 100.0]}), "ascii")
    assert text.isascii()
    assert "#" * 3 in text


def test_labels_tell_parts_and_vendors_apart() -> None:
    part = Device(id="MIG-1", vendor=Vendor.NVIDIA, index=1, parent="GPU-a")
    assert [row.split()[0] for row in shown(CARD, part).splitlines()[-2:]] == ["0", "0:1"]
    assert [row.split()[0] for row in shown(CARD, BARE).splitlines()[-2:]] == ["nvidia:0", "intel:0"]


@pytest.mark.parametrize(("expected", "is_shown"), [((), False), ((Vendor.AMD,), True)])
def test_a_missing_tool_is_shown_only_if_its_gpu_is_plugged_in(expected: tuple[Vendor, ...], *, is_shown: bool) -> None:
    missing = Problem(source="amd-smi", kind="missing", message="not installed", vendor=Vendor.AMD)
    assert ("amd-smi" in shown(CARD, problems=(missing,), expected=expected)) is is_shown


@given(name=st.text(max_size=60), width=st.integers(1, 200))
def test_any_name_and_any_width_can_be_shown(name: str, width: int) -> None:
    shown(Device(id="x", vendor=Vendor.NVIDIA, name=name), CARD, width=width, history={}, processes={})


@pytest.mark.parametrize("width", [30, 40, 50, 60])
def test_narrow_terminals_drop_the_least_needed_columns(width: int) -> None:
    lines = shown(CARD, width=width, history={}).splitlines()[-2:]
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("0  ")
    assert "12/24 GB" in lines[1]
    assert "37%" in lines[1]
    assert "procs" not in lines[0]


def test_processes_are_listed_by_memory() -> None:
    processes = (Process(pid=7, memory_mb=1024.0), Process(pid=8, memory_mb=10240.0, name="Xorg"), Process(pid=9))
    card = Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0, processes=processes)
    lines = shown(card, processes={7: ProcessInfo(user="ada", command="python train.py")}).splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["0", "8", "-", "10", "GB", "Xorg"],
        ["0", "7", "ada", "1", "GB", "python", "train.py"],
        ["0", "9", "-", "-", "-"],
    ]


def test_more_rows_or_processes_than_fit_are_counted() -> None:
    cards = [Device(id=f"GPU-{n}", vendor=Vendor.NVIDIA, index=n) for n in range(40)]
    lines = shown(*cards, height=24, processes={}).splitlines()
    assert len(lines) <= 24
    assert lines[-1] == f"and {40 - (len(lines) - 3)} more devices: enlarge the window to see them"
    card = Device(id="a", vendor=Vendor.AMD, processes=tuple(Process(pid=n) for n in range(40)))
    lines = shown(card, height=24, processes={}).splitlines()
    assert len(lines) <= 24
    assert "more processes" in lines[-1]


def test_problems_are_above_the_table_and_unhealthy_devices_marked() -> None:
    problem = Problem(source="nvml", kind="timeout", message="no answer")
    assert shown(CARD, problems=(problem,)).splitlines()[1] == "! nvml: no answer"
    assert "No GPU answered in time." in shown(problems=(problem,))
    ill = Device(id="GPU-b", vendor=Vendor.NVIDIA, index=1, name="Test", fault="GPU is lost")
    problem = Problem(source="GPU-b", kind="unhealthy", message="Test: GPU is lost")
    text = shown(ill, problems=(problem,))
    assert "unhealthy: Test" in text
    assert "! GPU-b: Test: GPU is lost" in text
    assert "gpuyard doctor" in shown()
