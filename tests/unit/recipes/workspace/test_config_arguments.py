"""A function of the user's turns configs into arguments; errors name the function and the config."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.prepare_sweep import arguments_of
from gpuyard.recipes.workspace.settings import load

PARSERS = """\
import os, sys
import in_work_dir

def to_options(config, path):
    print("a message")
    return [*(f"--{name}={value}" for name, value in config.items()), "--from", path]

def raising(config, path):
    return [config["nothing"]]

def returning_numbers(config, path):
    return ["--lr", config["lr"]]

def ending(config, path):
    sys.exit(0)

def second_fails(config, path):
    assert not path.endswith("b.yml"), "no b"
    return []

def environment(config, path):
    return [os.environ["WHO"], os.getcwd()]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace whose working directory is elsewhere; both have modules."""
    made = tmp_path / "w"
    (made / "configs").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/in_work_dir.py").write_text("")
    (made / "mine.py").write_text(PARSERS)
    (made / "configs/a.yml").write_text("lr: 1e-3\nlayers: [1, 2]\nname: no\n")
    (made / "configs/b.yml").write_text("")
    return made


def arguments(folder: Path, parser: str) -> list[tuple[str, ...]]:
    (folder / "scheduler_config.yml").write_text(f"work_dir: ../code\n{parser}")
    loaded = load(folder)
    paths = sorted((folder / "configs").iterdir())
    return arguments_of(loaded.settings, paths, folder, loaded.path, {**os.environ, "WHO": "me"})


def test_a_parser_gets_the_config_and_its_path_and_runs_in_work_dir_as_tasks_do(folder: Path) -> None:
    assert arguments(folder, "") == [("--config_path", f"{folder}/configs/{name}.yml") for name in "ab"]
    assert arguments(folder, "parser: mine:to_options") == [
        ("--lr=1e-3", "--layers=[1, 2]", "--name=False", "--from", f"{folder}/configs/a.yml"),
        ("--from", f"{folder}/configs/b.yml"),
    ]
    assert arguments(folder, "parser: mine:environment") == [("me", str(folder.parent / "code"))] * 2


@pytest.mark.parametrize(
    ("parser", "config", "message", "hint"),
    [
        ("mine:raising", "a", "KeyError: 'nothing'", 'mine.py", line 9'),
        ("mine:returning_numbers", "b", "KeyError: 'lr'", 'mine.py", line 12'),
        ("mine:ending", "a", "it ended Python with status 0", ""),
        ("mine:missing", "a", "AttributeError: module 'mine' has no attribute 'missing'", ""),
        ("mine:second_fails", "b", "AssertionError: no b", "mine.py"),
        ("other.thing:parse", "a", "ModuleNotFoundError: No module named 'other'", "in the workspace, in work_dir and"),
    ],
)
def test_an_error_names_the_parser_the_config_and_the_place(
    folder: Path, parser: str, config: str, message: str, hint: str
) -> None:
    if parser == "mine:returning_numbers":
        (folder / "configs/a.yml").write_text("lr: text\n")
    with pytest.raises(UserError) as caught:
        arguments(folder, f"parser: {parser}")
    assert caught.value.message == f"parser: {parser} failed for {folder}/configs/{config}.yml: {message}"
    assert hint in (caught.value.hint or "")


def test_a_parser_must_return_a_list_of_text(folder: Path) -> None:
    (folder / "configs/a.yml").write_text("lr: 0.5\n")
    with pytest.raises(UserError, match=r"a\.yml: TypeError: it returned \['--lr', 0\.5\], and not a list of text"):
        arguments(folder, "parser: mine:returning_numbers")


@pytest.mark.parametrize(("content", "message"), [("- 1\n", "no keys with values"), ("a: [\n", "not YAML")])
def test_a_config_that_is_no_mapping_is_reported(folder: Path, content: str, message: str) -> None:
    (folder / "configs/a.yml").write_text(content)
    with pytest.raises(UserError, match=rf"configs/a\.yml:.*{message}"):
        arguments(folder, "parser: mine:to_options")
