"""Typing mistakes in a submitted command."""

from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.ui.cli.command_grammar import Typed
from gpuyard.ui.cli.jobs.missing_programs import find_mistake, refuse_unit


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two scripts, and a PATH with `python` and `bash` alone. No configuration."""
    for name in ("bin/python", "bin/bash", "run.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
    for name in ("python", "bash"):
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", f"/nowhere:{tmp_path / 'bin'}")
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / "home"))
    return tmp_path


def mistake(place: Path, *command: str, lines: str | None = None, **options: str | list[str]) -> str | None:
    typed = Typed(dict(options), list(command))
    sent = {name: value for name, value in options.items() if name == "env"}
    return find_mistake(typed, {"command": list(command) or None, "list": lines, "options": sent}, str(place))


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("pyhton", "train.py"), "there is no program 'pyhton' on PATH; did you mean 'python'?"),
        (("env", "A=1", "pyhton"), "there is no program 'pyhton' on PATH; did you mean 'python'?"),
        (("env", "PATH=/nowhere", "python"), "there is no program 'python' on PATH"),
        (("zzzz",), "there is no program 'zzzz' on PATH"),
        (("python", "-u", "trian.py"), "there is no script 'trian.py' in {}; did you mean 'train.py'?"),
        (("./run.sh",), "'./run.sh' is not executable; did you mean 'bash ./run.sh'?"),
        (("./train.pyy",), "there is no program './train.pyy' in {}; did you mean './train.py'?"),
        (
            ("train.py",),
            "there is no program 'train.py' on PATH, but a file of this name; did you mean 'python train.py'?",
        ),
        (("cd", "src"), "'cd' is no program, but built into shells: "),
    ],
)
def test_a_missing_program_is_named_with_the_likely_word(place: Path, command: tuple[str, ...], found: str) -> None:
    text = mistake(place, *command)
    assert text is not None
    assert text.startswith(found.format(place)), text


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py", "--out", "new.py"), ("python", "-m", "package", "new.py"),
        ("python", "-c", "print(1)", "new.py"), ("bash", "-lc", "python new.py"), ("python", "{name}.py"),
        ("{name}", "train.py"), ("env", "-u", "A", "pyhton"), ("env", "A=1", "python", "train.py"),
    ],
)  # fmt: skip
def test_what_is_there_or_cannot_be_known_is_no_mistake(place: Path, command: tuple[str, ...]) -> None:
    assert mistake(place, *command) is None


def test_what_runs_elsewhere_or_is_made_by_an_earlier_job_is_not_looked_for(place: Path) -> None:
    assert mistake(place, "python", "made.py", after=["1"]) is None
    assert mistake(place, "./made", after=["1"]) is None
    assert mistake(place, "pyhton", after=["1"]) is not None
    assert mistake(place, "python", "train.py", env=["PATH=/nowhere"]) == "there is no program 'python' on PATH"
    assert mistake(place, "pyhton", image="pytorch") is None
    assert mistake(place, "pyhton", engine="slurm") is None
    assert mistake(place, "pyhton", engine="local") is not None
    (place / "home").mkdir(mode=0o700)
    (place / "home/config.toml").write_text('[queue]\nengine = "ray"\n')
    assert mistake(place, "pyhton") is None


def test_a_file_of_commands_is_looked_through_without_its_shell_lines(place: Path) -> None:
    assert mistake(place, lines="python train.py 1\n# note\n\ncd src; pyhton x\npython train.py 2\n") is None
    found = mistake(place, lines="python train.py 1\npyhton train.py 2\n")
    assert found == "there is no program 'pyhton' on PATH; did you mean 'python'?"


def test_a_unit_in_place_of_the_program_is_refused_with_the_form_in_one_word(place: Path) -> None:
    with pytest.raises(UserError) as caught:
        refuse_unit(Typed({"name": "x", "time-limit": "5"}, ["min", "--", "python"]), str(place))
    assert caught.value.hint == "write --time-limit 5min"
    (place / "bin/min").touch(0o755)
    refuse_unit(Typed({"time-limit": "5"}, ["min", "python"]), str(place))
    refuse_unit(Typed({"name": "x"}, ["hours"]), str(place))
