"""Which folder takes the place of one on a shared file system."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_directories as local_folder
from gpuyard.system.user_directories import find_local_folder


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders that stand for /var/lib/gpuyard and /var/tmp."""
    monkeypatch.setattr(local_folder, "_found", {})
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(tmp_path / "mounts"))
    lib, tmp = tmp_path / "lib", tmp_path / "tmp"
    monkeypatch.setattr(local_folder, "_BASES", (f"{lib}/{{uid}}", f"{tmp}/gpuyard-{{uid}}"))
    tmp.mkdir()
    tmp.chmod(0o1777)
    mount(tmp_path, home="nfs4")
    return lib, tmp


def mount(tmp_path: Path, **kinds: str) -> None:
    places = {name: tmp_path if name == "top" else tmp_path / name for name in kinds}
    lines = [f"1 1 0:1 / {places[name]} rw - {kind} x rw" for name, kind in kinds.items()]
    (tmp_path / "mounts").write_text("\n".join(["1 1 0:1 / / rw - ext4 x rw", *lines]))


def test_a_folder_on_a_local_disk_is_used_itself(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay"):
        mount(tmp_path, home=kind)
        found = find_local_folder(str(tmp_path / "home" / kind))
        assert (found.path, found.problem) == (str(tmp_path / "home" / kind), None)


def test_a_network_file_system_is_replaced_by_a_private_folder(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    found = find_local_folder(str(tmp_path / "home" / "gpuyard"))
    assert Path(found.path).parent == bases[1] / f"gpuyard-{os.geteuid()}"
    assert Path(found.path).stat().st_mode & 0o777 == 0o700
    assert found.problem == "it is on a network file system (nfs4)"
    other = find_local_folder(str(tmp_path / "home" / "other"))
    assert other.path != found.path
    local_folder._found.clear()
    assert find_local_folder(found.wanted).path == found.path


def test_a_renamed_machine_keeps_it(tmp_path: Path, bases: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = str(tmp_path / "home" / "gpuyard")
    before = find_local_folder(wanted).path
    local_folder._found.clear()
    monkeypatch.setattr("gpuyard.system.processes.host_name", lambda: "renamed")
    assert find_local_folder(wanted).path == before


def test_a_queue_stays_where_it_is_when_an_administrator_adds_a_place(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    wanted = str(tmp_path / "home" / "gpuyard")
    before = find_local_folder(wanted).path
    bases[0].mkdir()
    bases[0].chmod(0o1777)
    local_folder._found.clear()
    assert find_local_folder(wanted).path == before
    assert find_local_folder(str(tmp_path / "home" / "new")).path.startswith(str(bases[0]))


def test_without_a_local_disk_the_error_names_what_was_tried(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    mount(tmp_path, top="nfs4")
    with pytest.raises(EnvironmentFault, match=f"{bases[1]} is on nfs4") as caught:
        find_local_folder(str(tmp_path / "home" / "gpuyard"))
    assert "XDG_STATE_HOME" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["9p", "virtiofs", "fuse", "fuse.juicefs", "drvfs"])
def test_an_unknown_one_is_tested_once(
    tmp_path: Path, bases: tuple[Path, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(tmp_path, home=kind)
    tested: list[str] = []

    def test(folder: str) -> str:
        tested.append(folder)
        return "passed"

    monkeypatch.setattr(local_folder, "_run_test", test)
    wanted = str(tmp_path / "home" / "gpuyard")
    assert find_local_folder(wanted).path == wanted
    local_folder._found.clear()
    assert find_local_folder(wanted).path == wanted
    assert tested == [wanted]


def test_an_unknown_file_system_that_fails_the_test_is_replaced(
    tmp_path: Path, bases: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(tmp_path, home="9p")
    monkeypatch.setattr(local_folder, "_run_test", lambda _: "a second process does not see the locks of the first")
    found = find_local_folder(str(tmp_path / "home" / "gpuyard"))
    assert found.path.startswith(str(bases[1]))
    assert found.problem == ("its file system (9p) may be shared: a second process does not see the locks of the first")


def test_the_test_itself_passes_on_this_disk(tmp_path: Path, bases: tuple[Path, Path]) -> None:
    mount(tmp_path, home="9p")
    wanted = tmp_path / "home" / "gpuyard"
    assert find_local_folder(str(wanted)).path == str(wanted)
    assert [each.name for each in wanted.iterdir()] == [f"file-system.{local_folder_host()}"]


def local_folder_host() -> str:
    return os.uname().nodename.partition(".")[0].lower()
