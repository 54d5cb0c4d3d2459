"""Markers are set aside while a config is started again, and one command at a time changes a workspace."""

import fcntl
import os
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.workspace.workspace_files import without_marker
from gpuyard.system.file_locks import locked
from gpuyard.system.write_files import write_whole


def refuse(marker: Path) -> None:
    with without_marker(marker):
        assert not marker.exists()
        raise ValueError("refused")


def test_a_rerun_has_no_marker_and_a_refused_rerun_keeps_it(tmp_path: Path) -> None:
    marker = tmp_path / "a_completed.txt"
    marker.write_text("first\n")
    with pytest.raises(ValueError, match="refused"):
        refuse(marker)
    assert marker.read_text() == "first\n"
    with without_marker(marker):
        assert not marker.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_marker_set_aside_by_a_killed_process_is_not_restored(tmp_path: Path) -> None:
    marker = tmp_path / "a_completed.txt"
    (tmp_path / ".a_completed.txt.before").write_text("long ago\n")
    with pytest.raises(ValueError, match="refused"):
        refuse(marker)
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_an_unwritable_marker_names_it(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"out/a_completed\.txt cannot be written: Not a directory"):
        write_whole(tmp_path / "out" / "a_completed.txt", b"done\n")


def test_a_workspace_is_changed_by_one_command_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
