"""A workspace is created completely, and updating it loses nothing."""

import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, SETTING_TYPES, load
from gpuyard.recipes.workspace.workspace_files import CONFIG_TEMPLATE, WRAPPER_TEMPLATE, CreatedWorkspace, init
from tests.unit.recipes.workspace.test_settings import LEGACY


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_an_empty_folder_becomes_a_workspace(tmp_path: Path) -> None:
    made = init(tmp_path / "deep" / "exp", force=False)
    assert names(made.created) == [CONFIG_FILE, "scheduler.sh", "configs", "out"]
    assert (made.kept, made.backed_up) == ([], [])
    assert sorted(os.listdir(made.folder)) == sorted(["configs", "out", "scheduler.sh", CONFIG_FILE])
    assert os.access(made.folder / "scheduler.sh", os.X_OK)
    assert load(made.folder).settings.task_name == "exp"


def test_a_new_configuration_shows_every_key_with_its_default(tmp_path: Path) -> None:
    folder = init(tmp_path / "exp", force=False).folder
    fresh = load(folder).settings
    path = folder / CONFIG_FILE
    text = path.read_text()
    path.write_text("")
    assert load(folder).settings == fresh
    path.write_text(re.sub(r"^#(?=\w+:)", "", text, flags=re.MULTILINE))
    assert load(folder).settings == fresh
    for key in SETTING_TYPES:
        assert re.search(rf"^#?{key}:", text, re.MULTILINE), key


def test_a_workspace_consists_of_the_published_templates(tmp_path: Path) -> None:
    copied = tmp_path / "exp"
    copied.mkdir()
    shutil.copy(CONFIG_TEMPLATE, copied / CONFIG_FILE)
    shutil.copy(WRAPPER_TEMPLATE, copied / "scheduler.sh")
    assert os.access(copied / "scheduler.sh", os.X_OK)
    made = init(tmp_path / "made" / "exp", force=False).folder
    settings, paths = load(copied).settings, ("work_dir", "config_dir", "script_path", "output_dir")
    assert replace(load(made).settings, **{name: getattr(settings, name) for name in paths}) == settings
    for name, own in ((CONFIG_FILE, "task_name:"), ("scheduler.sh", "python=")):
        pairs = zip((copied / name).read_text().splitlines(), (made / name).read_text().splitlines(), strict=True)
        assert all(own in ours for theirs, ours in pairs if theirs != ours)


@pytest.mark.parametrize("name", ["-dash", "a 'b' \"c\" \\n", "$(touch x)", "größe: #1", "two\nlines", "x" * 255])
def test_a_folder_of_any_name_becomes_a_workspace(tmp_path: Path, name: str) -> None:
    folder = init(tmp_path / name, force=False).folder
    path = folder / CONFIG_FILE
    named = load(folder).settings.task_name
    path.write_text("")
    assert named == load(folder).settings.task_name


@pytest.mark.parametrize("name", [CONFIG_FILE, "scheduler.sh"])
def test_an_existing_workspace_is_not_touched_without_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="is a workspace already") as caught:
        init(tmp_path, force=False)
    assert "--force" in str(caught.value.hint)
    assert contents(tmp_path) == before


def legacy(folder: Path) -> Path:
    (folder / CONFIG_FILE).write_text(LEGACY)
    (folder / "scheduler.sh").write_text("#!/bin/bash\necho old\n")
    for name in ("configs", "out"):
        (folder / name).mkdir()
        (folder / name / "a").write_text("mine")
    return folder


def test_force_keeps_all_values_and_backs_up_replaced_files(tmp_path: Path) -> None:
    folder = legacy(tmp_path)
    before = load(folder).settings
    made = init(folder, force=True)
    assert [(path.name, backup.name) for path, backup in made.backed_up] == [
        (CONFIG_FILE, f"{CONFIG_FILE}.bak"),
        ("scheduler.sh", "scheduler.sh.bak"),
    ]
    assert load(folder).settings == before
    assert (folder / CONFIG_FILE).read_text().startswith(LEGACY)
    assert "#vram:" in (folder / CONFIG_FILE).read_text()
    assert (folder / f"{CONFIG_FILE}.bak").read_text() == LEGACY
    assert (folder / "scheduler.sh.bak").read_text() == "#!/bin/bash\necho old\n"
    assert os.access(folder / "scheduler.sh", os.X_OK)
    assert (folder / "configs" / "a").read_text() == (folder / "out" / "a").read_text() == "mine"


def test_force_a_second_time_changes_nothing(tmp_path: Path) -> None:
    folder = legacy(tmp_path)
    init(folder, force=True)
    before = contents(folder)
    made = init(folder, force=True)
    assert contents(folder) == before
    assert (made.created, made.backed_up) == ([], [])
    fresh = init(folder / "fresh", force=False).folder
    before = contents(fresh)
    everything = [fresh / name for name in (CONFIG_FILE, "scheduler.sh", "configs", "out")]
    assert init(fresh, force=True) == CreatedWorkspace(folder=fresh, kept=everything)
    assert contents(fresh) == before


def test_a_backup_is_never_overwritten(tmp_path: Path) -> None:
    for number, text in enumerate(["first", "second", "third"]):
        (tmp_path / "scheduler.sh").write_text(text)
        made = init(tmp_path, force=True)
        assert made.backed_up[0][1].name == ("scheduler.sh.bak", "scheduler.sh.bak-2", "scheduler.sh.bak-3")[number]
    assert [(tmp_path / f"scheduler.sh.bak{end}").read_text() for end in ("", "-2", "-3")] == [
        "first",
        "second",
        "third",
    ]


@pytest.mark.parametrize(
    "text",
    ["task_name: a", "{task_name: a, max_retries: 1}\n", "notify: |+\n  mail me\n\n", "task_name: a\n...\n", "# mine"],
)
def test_new_keys_come_after_the_users_own_text_and_change_no_value(tmp_path: Path, text: str) -> None:
    path = tmp_path / CONFIG_FILE
    path.write_text(text)
    before = load(tmp_path).settings
    init(tmp_path, force=True)
    assert path.read_text().startswith(text)
    assert len(path.read_text()) > len(text)
    assert load(tmp_path).settings == before


def test_a_configuration_keeps_its_line_ends_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / CONFIG_FILE
    path.write_bytes(b"task_name: a\r\nmax_retries: 1\r\n")
    path.chmod(0o600)
    init(tmp_path, force=True)
    assert path.read_bytes().startswith(b"task_name: a\r\nmax_retries: 1\r\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / f"{CONFIG_FILE}.bak").stat().st_mode) == 0o600


def test_a_configuration_with_a_mistake_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / CONFIG_FILE
    path.write_text("task_nam: a\n")
    assert path in init(tmp_path, force=True).kept
    assert path.read_text() == "task_nam: a\n"


def test_the_target_of_a_link_is_not_written(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "c.yml").write_text("task_name: a\n")
    (shared / "s.sh").write_text("old")
    folder = tmp_path / "ws"
    folder.mkdir()
    (folder / CONFIG_FILE).symlink_to(shared / "c.yml")
    (folder / "scheduler.sh").symlink_to(shared / "s.sh")
    before = contents(shared)
    made = init(folder, force=True)
    assert contents(shared) == before
    assert (folder / CONFIG_FILE).is_symlink()
    assert not (folder / "scheduler.sh").is_symlink()
    assert made.backed_up[0][1].readlink() == shared / "s.sh"


def test_the_folders_named_in_the_configuration_are_created(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(f"config_dir: runs/configs\noutput_dir: {tmp_path.parent}/elsewhere\n")
    init(tmp_path, force=True)
    assert (tmp_path / "runs" / "configs").is_dir()
    assert not (tmp_path / "configs").exists()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path.parent / "elsewhere").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_file_cannot_become_a_workspace(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        init(tmp_path / "file", force=force)


def test_a_workspace_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot create the workspace .*: Not a directory"):
        init(tmp_path / "file" / "ws", force=False)
    (tmp_path / "scheduler.sh").mkdir()
    with pytest.raises(EnvironmentFault, match="Is a directory"):
        init(tmp_path, force=True)
    assert not list(tmp_path.glob("*.bak*"))
