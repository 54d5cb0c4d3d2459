import os
from pathlib import Path

import pytest

from gpuyard.system.file_locks import kept_from_cleaning, try_lock


@pytest.mark.linux("systemd-tmpfiles and the sticky bit of files are Linux's")
def test_a_folder_is_locked_and_its_files_are_marked_as_systemd_tmpfiles_expects(tmp_path: Path) -> None:
    (tmp_path / "early").touch(0o600)
    (tmp_path / "link").symlink_to("/etc/hostname")
    cleaner = os.open(tmp_path, os.O_RDONLY)
    with kept_from_cleaning(str(tmp_path)):
        assert not try_lock(cleaner)
        assert (tmp_path / "early").stat().st_mode & 0o7777 == 0o1600
        (tmp_path / "late").touch(0o640)
    assert try_lock(cleaner)
    os.close(cleaner)
    assert (tmp_path / "late").stat().st_mode & 0o7777 == 0o1640
