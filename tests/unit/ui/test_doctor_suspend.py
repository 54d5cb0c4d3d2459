"""What `gpuyard doctor` says about the speed of suspending."""

from pathlib import Path

import pytest

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.probes.fallback_chain import Checkup
from gpuyard.ui.cli.machine.doctor import suspend_notices


def checkup(vendor: Vendor) -> Checkup:
    device = Device(id="G0", vendor=vendor, index=0, name="card")
    return Checkup(probe="tool", vendor=vendor, devices=(device,), problems=(), seconds=0.1)


def notices(tmp_path: Path, huge_pages: str | None, vendor: Vendor = Vendor.NVIDIA) -> str:
    path = tmp_path / "enabled"
    if huge_pages is not None:
        path.write_text(f"{huge_pages}\n")
    return "\n".join(suspend_notices([checkup(vendor)], path))


@pytest.mark.parametrize("chosen", ["madvise", "never"])
def test_small_pages_are_named_with_what_they_cost_and_what_to_set(tmp_path: Path, chosen: str) -> None:
    said = notices(tmp_path, f"always [{chosen}]")
    assert said.startswith(f"transparent huge pages are set to {chosen}: ")
    assert "20 GB in 9.8 to 13.7 s instead of 6.7 to 7.5 s" in said
    assert said.endswith("echo always > /sys/kernel/mm/transparent_hugepage/enabled")


def test_nothing_is_said_where_nothing_would_be_faster(tmp_path: Path) -> None:
    assert notices(tmp_path, "[always] madvise never") == ""
    assert notices(tmp_path, "always [madvise] never", Vendor.AMD) == ""


def test_nothing_is_said_on_systems_without_these_settings(tmp_path: Path) -> None:
    assert notices(tmp_path, None) == ""
