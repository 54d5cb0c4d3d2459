"""The type of a file system by the list of mounts."""

from pathlib import Path

import pytest

from gpuyard.system.user_directories import file_system

MOUNTS = """\
22 1 4095:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 4095:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2
31 30 4095:41 / /home/alice/fast\\040disk rw - xfs /dev/vdb rw
32 22 4095:42 / /mnt/share rw - ext4 /dev/vdc rw
33 22 4095:43 / /mnt/share rw - cifs //server/share rw
34 22 4095:44 / /srv/back\\134slash rw - fuse.sshfs server: rw
garbage
"""


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(path))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/lib/gpuyard", "ext4"), ("/", "ext4"), ("/home", "nfs4"), ("/home/alice/.gpu_locks", "nfs4"),
        ("/homeless", "ext4"), ("/home/alice/fast disk/locks", "xfs"), ("/mnt/share/locks", "cifs"),
        ("/srv/back\\slash/locks", "fuse.sshfs"),
    ],
)  # fmt: skip
def test_the_nearest_and_last_mount_decides_the_file_system(folder: str, kind: str) -> None:
    assert file_system(folder) == kind


def test_without_a_list_of_mounts_the_type_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(tmp_path / "missing"))
    assert file_system(str(tmp_path)) is None


def test_the_target_of_a_link_decides_the_file_system(tmp_path: Path) -> None:
    link = tmp_path / "locks"
    link.symlink_to("/home/alice/locks")
    assert file_system(str(link)) == "nfs4"
