"""Memory of AMD cards that is read often: from kernel files, else by a call of the library for one card."""

from pathlib import Path
from typing import Any

import pytest

from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.probes.amd.amdsmi_library import AmdSmiLibrary
from tests.fakes.amd_kernel import BUS_ID, MB, NUMBER, AmdKernel
from tests.unit.probes.test_amd_library import amdsmi, answer, refuse

__all__ = ["amdsmi"]  # a fixture


@pytest.fixture
def kernel(tmp_path: Path) -> AmdKernel:
    return AmdKernel(tmp_path)


def desktop(amdsmi: Any) -> None:
    """Let the library list a desktop besides the program."""
    listed = [
        {"name": "python3", "pid": 12, "mem": 0, "memory_usage": {"vram_mem": 1 * MB}},
        {"name": "Xorg", "pid": 7, "mem": 0, "memory_usage": {"vram_mem": 300 * MB}},
    ]
    amdsmi.amdsmi_get_gpu_process_list = answer(listed)


def held(device: Device) -> dict[int, float | None]:
    return {process.pid: process.memory_mb for process in device.processes or ()}


def forbid_slow_calls(amdsmi: Any) -> None:
    for name in dir(amdsmi):
        if name.startswith("amdsmi_get_") and name != "amdsmi_get_gpu_memory_usage":
            setattr(amdsmi, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


def test_memory_and_processes_are_read_again_without_a_call_of_the_library(amdsmi: Any, kernel: AmdKernel) -> None:
    kernel.compute(12, 500.0)
    kernel.run(7, "Xorg")
    desktop(amdsmi)
    probe = AmdSmiLibrary(kernel.root)
    (before,) = probe.read(5).devices
    assert held(before) == {12: 500.0, 7: 300.0}, "the same source as later: another one would look like growth"
    forbid_slow_calls(amdsmi)
    amdsmi.amdsmi_get_gpu_memory_usage = lambda *_: pytest.fail("the kernel's file costs less")
    kernel.use(9000.0)
    kernel.compute(12, 8000.0)
    kernel.compute(13, 100.0, "new")
    kernel.compute(14, 0.0, "computes on another card")
    (after,) = probe.read_memory([before])
    assert (after.id, after.memory_total_mb, after.memory_used_mb, after.memory_free_mb) == (
        before.id, 16384.0, 9000.0, 7384.0,
    )  # fmt: skip
    assert held(after) == {12: 8000.0, 7: 300.0, 13: 100.0}
    assert next(each for each in after.processes or () if each.pid == 13).name == "new"


def test_a_process_that_has_ended_is_no_longer_listed(amdsmi: Any, kernel: AmdKernel) -> None:
    desktop(amdsmi)
    kernel.run(7, "Xorg")
    probe = AmdSmiLibrary(kernel.root)
    (before,) = probe.read(5).devices
    assert held(before) == {7: 300.0}, "12 has ended since the library listed it"
    (kernel.root / "proc/7/comm").unlink()
    (kernel.root / "proc/7").rmdir()
    (after,) = probe.read_memory([before])
    assert after.processes == ()


def test_in_a_container_only_the_used_memory_is_read_again(amdsmi: Any, kernel: AmdKernel) -> None:
    kernel.enter_container()
    kernel.compute(4711, 500.0)  # the pid outside of the container
    probe = AmdSmiLibrary(kernel.root)
    (before,) = probe.read(5).devices
    forbid_slow_calls(amdsmi)
    kernel.use(9000.0)
    (after,) = probe.read_memory([before])
    assert after.memory_used_mb == 9000.0
    assert after.processes == before.processes == (Process(pid=12, memory_mb=1.0, name="python3"),)


def test_the_library_is_asked_where_the_kernel_has_no_such_file(amdsmi: Any, tmp_path: Path) -> None:
    probe = AmdSmiLibrary(tmp_path)
    (before,) = probe.read(5).devices
    forbid_slow_calls(amdsmi)
    amdsmi.amdsmi_get_gpu_memory_usage = answer(9000 * MB)
    (after,) = probe.read_memory([before])
    assert (after.memory_total_mb, after.memory_used_mb) == (16384.0, 9000.0)
    amdsmi.amdsmi_get_gpu_memory_usage = refuse
    assert probe.read_memory([before]) == []


def test_partitions_are_not_taken_for_their_card(amdsmi: Any, kernel: AmdKernel) -> None:
    amdsmi.amdsmi_get_processor_handles = answer(["first", "second"])
    kernel.node(2, NUMBER + 1, 0x0500 | 1 << 28)
    kernel.compute(12, 500.0)
    probe = AmdSmiLibrary(kernel.root)
    before = probe.read(5).devices
    assert [held(each) for each in before] == [{12: None}] * 2
    kernel.use(9000.0)
    assert [each.memory_used_mb for each in probe.read_memory(before)] == [1024.0, 1024.0], "as the library says"


def test_a_card_is_found_by_its_place_on_the_bus(amdsmi: Any, kernel: AmdKernel) -> None:
    amdsmi.amdsmi_get_processor_handles = answer(["first", "second"])
    places = {"first": BUS_ID, "second": "0001:c3:02.1"}
    amdsmi.amdsmi_get_gpu_device_bdf = places.__getitem__
    amdsmi.amdsmi_get_gpu_device_uuid = amdsmi.amdsmi_get_gpu_asic_info = refuse
    kernel.node(2, 777, 0xC300 | 2 << 3 | 1, domain=1)
    kernel.compute(12, 500.0)
    kernel.compute(12, 2500.0, number=777)
    first, second = AmdSmiLibrary(kernel.root).read(5).devices
    assert (held(first), held(second)) == ({12: 500.0}, {12: 2500.0})


@pytest.mark.parametrize("content", ["", "none", "-1", "1e400", "\xff"])
def test_files_with_odd_content_count_as_missing(amdsmi: Any, kernel: AmdKernel, content: str) -> None:
    kernel.compute(12, 500.0)
    for path in [path for path in kernel.root.rglob("*") if path.is_file()]:
        path.write_text(content)
    probe = AmdSmiLibrary(kernel.root)
    (before,) = probe.read(5).devices
    (after,) = probe.read_memory([before])
    assert (after.memory_used_mb, held(after)) == (1024.0, {12: 1.0}), "as the library says"
