"""A workspace is created completely, and updating it loses nothing."""

import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, SETTING_TYPES, load
from gpuyard.recipes.workspace.workspace_files import (
    CONFIG_TEMPLATE,
    WRAPPER_TEMPLATE,
    CreatedWorkspace,
    check_config_names,
    init,
    session_name,
    slug,
    tmux_name,
    without_marker,
    workspace_tag,
)
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
    marker = tmp_path / "a_completed.txt"
    (tmp_path / ".a_completed.txt.before").write_text("long ago\n")
    with pytest.raises(ValueError, match="refused"):
        refuse(marker)
    assert list(tmp_path.iterdir()) == []


HOSTILE = [
    "a b",
    "it's",
    '"q"',
    "$(touch x)",
    "a;b",
    "a:b",
    "a.b",
    "-dash",
    "=eq",
    "two\nlines",
    "{gpu}",
    "#{pid}",
    "%1",
]


def test_plain_names_are_not_changed_and_mapped_ones_stay_different() -> None:
    assert session_name("TASK", "exp1") == "TASK_exp1_{gpu}"
    assert tmux_name("TASK_scheduler") == "TASK_scheduler"
    assert session_name("실험", "größe-2") == "실험_größe-2_{gpu}"
    assert slug("v1.2_a-b") == "v1.2_a-b"
    assert len({tmux_name(name) for name in ("a b", "a:b", "a.b", "a_b")}) == 4
    assert len({slug(name) for name in ("a b", "a:b", "a/b", "a_b")}) == 4


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_tmux_cannot_hold_is_mapped(name: str) -> None:
    mapped = tmux_name(name)
    assert mapped != name
    assert all(letter.isalnum() or letter in "_-" for letter in mapped)
    assert not mapped.startswith("-")
    assert session_name(name, "").count("{gpu}") == 1


@given(st.text())
def test_any_name_becomes_usable(name: str) -> None:
    session, part = tmux_name(name), slug(name)
    assert 0 < len(session) <= 80
    assert 0 < len(part.encode()) <= 60
    assert all(letter.isalnum() or letter in "_-" for letter in session)
    assert all(letter.isalnum() or letter in "_-." for letter in part)
    assert session[0] != "-"
    assert part[0] not in "-."


def test_a_folder_has_one_tag_of_its_own_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my exp"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    tag = workspace_tag(folder)
    assert tag.startswith("my_exp-")
    assert workspace_tag(tmp_path / "link") == tag
    monkeypatch.chdir(folder)
    assert workspace_tag(Path()) == tag
    assert workspace_tag(tmp_path / "a" / "ws") != workspace_tag(tmp_path / "b" / "ws")


def test_ordinary_and_unusual_names_are_accepted() -> None:
    check_config_names([Path(f"{name}.yml") for name in ("a", "b c", "-d", "$(e)", "größe", "x" * 180)])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.yml", "b.yml", "a.yaml"], r"a\.yml and a\.yaml have the same name 'a'"),
        (["x" * 181 + ".yml"], "too long"),
        (["é" * 91 + ".yml"], "too long"),
        (["two\nlines.yml"], "control characters"),
        (["bell\x07.yml"], "control characters"),
        (["line\u2028end.yml"], "control characters"),
        ([os.fsdecode(b"caf\xe9.yml")], "not UTF-8"),
    ],
)
def test_unusable_config_names_are_reported(files: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_config_names([Path(file) for file in files])
    assert caught.value.hint
    caught.value.message.encode()
