"""Leases and tickets of another machine, where two machines see one lease directory."""

import os
from pathlib import Path

import msgspec
import pytest

from gpuyard.ledger.lock_file import LedgerScan, LockFile
from gpuyard.ledger.records import encode_lease
from gpuyard.model.lease import Claim, Holder, Share
from gpuyard.system.processes import this_process


def leave(folder: Path, name: str, holder: Holder) -> LockFile:
    return LockFile(folder / f"{name}.lease", encode_lease(holder, Claim(shares=(Share(device_id="SIM-0"),))))


@pytest.mark.linux("only Linux has a boot id")
@pytest.mark.parametrize("is_held", [True, False], ids=["cluster-wide locks", "local locks"])
def test_leases_of_another_machine_neither_count_nor_are_removed(tmp_path: Path, is_held: bool) -> None:
    me = this_process()
    elsewhere = msgspec.structs.replace(me, boot_id="another", machine="bravo-0123")
    rebooted = msgspec.structs.replace(me, boot_id="another")
    files = [leave(tmp_path, "1-far", elsewhere), leave(tmp_path, "2-old", rebooted), leave(tmp_path, "3-own", me)]
    if not is_held:
        for file in files:
            file.leave()
    scan = LedgerScan(tmp_path)
    assert [each.id for each in scan.held_files()] == (["2-old", "3-own"] if is_held else [])
    scan.remove_dead()
    assert "1-far.lease" in os.listdir(tmp_path)
    assert len(os.listdir(tmp_path)) == (3 if is_held else 1)
