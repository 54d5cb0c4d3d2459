"""Check the blocks of code in the docs, which readers copy. `tests/integration/test_docs.py` runs those that can run
anywhere; here all others are parsed, and every option of every `gpuyard` command is looked up."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from gpuyard.config import parse_config
from gpuyard.recipes.workspace.settings import TaskOptions, load, load_task_options
from gpuyard.ui.cli.verbs import VERBS, import_verb

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# What starts a command within a line of a shell.
BEFORE_COMMAND = re.compile(r"\s*(?:&&|\|\||[;|]|\$\()\s*|\)\s*")


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each block in these languages."""
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            indent, language, code = found.groups()
            if language in languages:
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.relative_to(ROOT)}:{line}", re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


def every(*languages: str) -> pytest.MarkDecorator:
    cases = [pytest.param(place, code, id=place) for place, code in blocks(*languages)]
    assert cases
    return pytest.mark.parametrize(("place", "code"), cases)


@every("toml")
def test_a_block_of_toml_is_a_configuration_that_the_daemon_reads(place: str, code: str) -> None:
    values = tomllib.loads(code)
    if "project" not in values:  # of a package with an engine
        parse_config(values, Path(place))


@every("yaml")
def test_a_block_of_yaml_has_only_keys_that_a_workspace_takes(place: str, code: str, tmp_path: Path) -> None:
    values = yaml.safe_load(code)
    if "workspace" not in place:
        return
    file = tmp_path / "scheduler_config.yml"
    file.write_text(code)
    if "scheduler" in values:
        assert load_task_options(file) != TaskOptions(), "the keys of `scheduler:` are gpuyard's"
    else:
        load(tmp_path)


@every("json")
def test_a_block_of_json_is_one_value_or_one_on_each_line(place: str, code: str) -> None:
    try:
        json.loads(code)
    except json.JSONDecodeError:
        for line in code.splitlines():
            json.loads(line)


@every("py", "python")
def test_a_block_of_python_compiles(place: str, code: str) -> None:
    compile(code, place, "exec")


@every("bash", "sh")
def test_a_block_of_shell_has_correct_syntax(place: str, code: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


@every("bash", "sh", "console")
def test_a_gpuyard_command_in_a_block_has_only_options_that_exist(place: str, code: str) -> None:
    for words in gpuyard_commands(code):
        options, verb = options_of(words[0]), words[0]
        for word in words[1:]:
            if word == "--":
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"gpuyard {verb} {word}"


def gpuyard_commands(code: str) -> Iterator[list[str]]:
    """Yield the words after `gpuyard` of each command."""
    for line in code.replace("\\\n", " ").splitlines():
        for part in BEFORE_COMMAND.split(line.removeprefix("$ ").removeprefix("> ")):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # half of a quoted text
                continue
            starts = [at for at, word in enumerate(words) if Path(word).name == "gpuyard"][:1]
            if starts and len(words) > starts[0] + 1 and not words[starts[0] + 1].startswith("-"):
                yield words[starts[0] + 1 :]


@cache
def options_of(verb: str) -> set[str]:
    """Return the options of a verb and of its subcommands. An unknown verb is an error."""
    assert verb in VERBS, f"there is no command gpuyard {verb}"
    top = import_verb(verb).VERB
    verbs = (top, *(below.VERB for below in top.commands.values()))
    return {"--help", *(f"--{option.name}" for each in verbs for option in each.options)}
