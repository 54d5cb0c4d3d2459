"""Default budgets: a part of the free memory."""

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.recipes.render.memory import leased_memory as default_budgets
from gpuyard.recipes.render.memory.leased_memory import choose_ram, choose_vram


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    show_machine(monkeypatch, available_mb=8000.0)


def show_machine(monkeypatch: pytest.MonkeyPatch, available_mb: float | None) -> None:
    devices = tuple(
        Device(id=f"SIM-{number}", vendor=Vendor.SIMULATED, index=number, memory_free_mb=free)
        for number, free in enumerate((100.0, 500.0, None))
    )
    current = Snapshot(taken_at=None, host=Host(memory_available_mb=available_mb), devices=devices)
    monkeypatch.setattr(default_budgets, "snapshot", lambda: current)


def test_the_vram_budget_is_most_of_the_free_memory_of_the_emptiest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "3x1GB")
    assert choose_vram("auto").mb == 400.0
    assert choose_vram("auto").text() == "400 MB (80% of the free memory of the device with the most)"


def test_without_a_gpu_vram_is_simulated_in_a_part_of_ram() -> None:
    assert choose_vram("host").text() == "2 GB (a quarter of the available RAM)"


def test_the_ram_budget_is_half_of_the_available_memory() -> None:
    assert choose_ram().mb == 4000.0


def test_without_a_figure_for_available_memory_the_budget_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    show_machine(monkeypatch, available_mb=None)
    with pytest.raises(EnvironmentFault) as caught:
        choose_ram()
    assert caught.value.hint == "set the budget with --ram-budget, such as 8G"
