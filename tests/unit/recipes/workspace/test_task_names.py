"""Names of workspaces, sessions and configs."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.workspace_files import check_config_names, session_name, slug, tmux_name, workspace_tag

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


def test_a_plain_name_is_not_changed() -> None:
    assert session_name("TASK", "exp1") == "TASK_exp1_{gpu}"
    assert tmux_name("TASK_scheduler") == "TASK_scheduler"
    assert session_name("실험", "größe-2") == "실험_größe-2_{gpu}"
    assert slug("v1.2_a-b") == "v1.2_a-b"


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


def test_names_that_differ_only_in_mapped_characters_stay_different() -> None:
    assert len({tmux_name(name) for name in ("a b", "a:b", "a.b", "a_b")}) == 4
    assert len({slug(name) for name in ("a b", "a:b", "a/b", "a_b")}) == 4


def test_a_folder_has_the_same_tag_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my exp"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    tag = workspace_tag(folder)
    assert tag.startswith("my_exp-")
    assert workspace_tag(tmp_path / "link") == tag
    monkeypatch.chdir(folder)
    assert workspace_tag(Path()) == tag


def test_folders_with_the_same_name_have_different_tags(tmp_path: Path) -> None:
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
