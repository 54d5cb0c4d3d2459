"""Xids in the kernel's log."""

from pathlib import Path

import pytest

from gpuyard.probes.nvidia.nvml_health_and_energy import KernelLog, find_xids

NEW = "4,1234,99,-;NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
OLD = "NVRM: Xid (0000:03:00): 14, Channel 00000001\n"
OTHERS = "NVRM: GPU at 0000:03:00: GPU-b850\nXid (PCI:0000:65:00): 79\nNVRM: Xid (PCI:nonsense): 79\n"


@pytest.mark.parametrize(
    ("text", "found"), [(NEW, [("0000:65:00.0", 79)]), (OLD, [("0000:03:00.0", 14)]), (OTHERS, []), (NEW + OLD, 2)]
)
def test_messages_of_the_driver_are_found(text: str, found: list[tuple[str, int]] | int) -> None:
    xids = list(find_xids(text))
    assert (len(xids) if isinstance(found, int) else xids) == found


def test_only_messages_after_the_first_call_count_that_this_user_may_read(tmp_path: Path) -> None:
    path = tmp_path / "dev/kmsg"
    path.parent.mkdir()
    path.write_text(NEW)
    log = KernelLog(tmp_path)
    assert log.new_xids() == []
    with path.open("a") as file:
        file.write(OLD)
    assert log.new_xids() == [("0000:03:00.0", 14)]
    assert log.new_xids() == []
    log = KernelLog(tmp_path)
    assert (log.new_xids(), log.new_xids()) == ([], [])
