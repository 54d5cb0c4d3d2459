"""Selecting configs and their GPUs, and the command that each is started with."""

import os
import sys
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace import prepare_sweep
from gpuyard.recipes.workspace.prepare_sweep import (
    choose_configs,
    choose_devices,
    hook_command,
    path_in_work_dir,
    split_lists,
    task_command,
    task_environment,
)
from gpuyard.recipes.workspace.settings import LoadedSettings, load
from tests.unit.recipes.workspace.test_conda_environment import Installation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "w"
    (made / "configs").mkdir(parents=True)
    (made / "train.py").write_text("")
    (made / "scheduler_config.yml").write_text("")
    for name in ("heavy.yml", "light.yml", "a,b.yml", "notes.txt", ".hidden.yml"):
        (made / "configs" / name).write_text("")
    (made / "configs" / "folder.yml").mkdir()
    return made


def loaded_settings(folder: Path, text: str) -> LoadedSettings:
    (folder / "scheduler_config.yml").write_text(text)
    return load(folder)


def names(folder: Path, text: str | None) -> list[str]:
    return [path.name for path in choose_configs(load(folder).settings, folder, [] if text is None else [text])]


def test_configs_are_all_that_match_or_those_named_in_the_given_order(folder: Path) -> None:
    assert names(folder, None) == names(folder, " ") == ["a,b.yml", "heavy.yml", "light.yml"]
    assert names(folder, "light.yml, heavy") == ["light.yml", "heavy.yml"]
    assert names(folder, "configs/light.yml") == ["light.yml"]
    assert names(folder, "a,b.yml") == ["a,b.yml"], "a comma may be part of a name"
    chosen = choose_configs(load(folder).settings, folder, ["light.yml", "a,b.yml", "heavy,"])
    assert [path.name for path in chosen] == ["light.yml", "a,b.yml", "heavy.yml"]


def test_configs_are_in_natural_order(folder: Path) -> None:
    ordered = ["7.yml", "batch.yml", "batch1.yml", "batch2.yml", "batch2b9.yml", "batch2b10.yml", "batch010.yml",
               "batch10.yml", "batch11.yml"]  # fmt: skip
    for name in reversed(ordered):
        (folder / "configs" / name).write_text("")
    assert [name for name in names(folder, None) if name[0] in "7b"] == ordered


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("haevy.yml", "there is no config 'haevy.yml'", "did you mean 'heavy.yml'?"),
        ("notes.txt", "there is no config 'notes.txt'", "the configs are"),
        ("heavy,heavy.yml", "'heavy.yml' is named twice", "name each config once"),
        ("../other/configs/heavy.yml", "there is no config '../other/configs/heavy.yml'", "did you mean 'heavy.yml'?"),
    ],
)
def test_a_config_that_is_missing_or_named_twice_is_a_mistake(folder: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_configs(load(folder).settings, folder, [text])
    assert message in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_a_folder_without_configs_is_a_mistake(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no config in .*\*\.yaml"):
        choose_configs(loaded_settings(folder, 'config_pattern: "*.yaml"').settings, folder, [])
    with pytest.raises(UserError, match=r"config_dir: cannot read"):
        choose_configs(loaded_settings(folder, "config_dir: nowhere").settings, folder, [])


def test_gpus_are_given_per_config_for_all_or_by_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(folder).settings
    assert choose_devices(settings, 3, "1,0, 0") == (["1", "0", "0"], [])
    assert choose_devices(settings, 3, "1") == (["1", "1", "1"], [])
    assert choose_devices(settings, 2, None) == ([None, None], [])
    for text in ("1,0", "1,,0", ","):
        with pytest.raises(UserError, match="GPUs"):
            choose_devices(settings, 3, text)
    monkeypatch.setenv("GPUYARD_SIMULATE", "3x24GB")
    assert choose_devices(loaded_settings(folder, "gpu_count: 2").settings, 1, None) == (["SIM-0,SIM-1"], [])
    devices, notes = choose_devices(loaded_settings(folder, "gpu_count: 8").settings, 1, None)
    assert devices == ["SIM-0,SIM-1,SIM-2"]
    assert "this machine has 3" in notes[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert choose_devices(loaded_settings(folder, "gpu_count: 1").settings, 1, None) in (
        (["SIM-1"], []),
        (["SIM-2"], []),
    )


@pytest.mark.parametrize(
    ("words", "configs"),
    [
        ([], []),
        (["heavy.yml", "light.yml"], ["heavy.yml", "light.yml"]),
        (["heavy.yml", "light", "1,0"], ["heavy.yml", "light"]),
        (["configs/heavy.yml", "configs/light.yml"], ["configs/heavy.yml", "configs/light.yml"]),
        (["light.yml,heavy.yml", "a,b.yml", "amd:0"], ["light.yml,heavy.yml", "a,b.yml"]),
        (["heavy.yml", "7"], ["heavy.yml"]),
        (["heavy.yml", "7.yml"], ["heavy.yml", "7.yml"]),
        (["", "1"], [""]),
        (["haevy.yml", "1", "0"], ["haevy.yml"]),
    ],
)
def test_configs_may_be_separate_words_before_the_gpus(folder: Path, words: list[str], configs: list[str]) -> None:
    (folder / "configs/7.yml").write_text("")
    settings = load(folder).settings
    assert split_lists(settings, words) == (configs, words[len(configs) :])


# Commands


def command(folder: Path, text: str, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    loaded = loaded_settings(folder, text)
    return task_command(loaded.settings, loaded.workspace, environment or dict(os.environ))


def test_paths_inside_the_working_directory_are_relative_to_it(folder: Path, tmp_path: Path) -> None:
    settings = load(folder).settings
    assert path_in_work_dir(f"{folder}/configs/a.yml", settings) == "configs/a.yml"
    assert path_in_work_dir(f"{tmp_path}/a.yml", settings) == f"{tmp_path}/a.yml"
    assert path_in_work_dir(f"{folder}/-a.yml", settings) == "./-a.yml"
    assert path_in_work_dir(f"{folder}/..a.yml", settings) == "..a.yml"


def test_the_interpreter_is_found_on_path_by_path_or_in_an_environment_folder(folder: Path) -> None:
    (folder / "my env" / "bin").mkdir(parents=True)
    (folder / "my env" / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin").symlink_to(folder / "my env" / "bin")
    own = f"{folder}/my env/bin/python"
    assert command(folder, f"python_env: {sys.executable}")[0] == sys.executable
    assert command(folder, "python_env: my env")[0] == own
    assert command(folder, "python_env: my env/bin/python")[0] == own
    assert command(folder, "python_env: python -u -X dev", {"PATH": f"{folder}/bin"}) == (
        f"{folder}/bin/python", "-u", "-X", "dev", "train.py",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python_env: nosuchpython", "python_env: there is no program 'nosuchpython'"),
        ("python_env: ./train.py", "python_env: .* is not executable"),
        ('python_env: "python \'"', "python_env: cannot parse"),
        ("script_path: nothing.py", "script_path: there is no script"),
        ("work_dir: nowhere", "work_dir: there is no folder"),
        ("hook: hooks/none.sh", "hook: there is no program '.*/hooks/none.sh'"),
        ("hook: ./train.py", "hook: .*/train.py is not executable"),
        ("hook: no-such-hook", "hook: there is no program 'no-such-hook'"),
    ],
)
def test_a_command_that_cannot_start_is_reported_before_anything_starts(folder: Path, text: str, message: str) -> None:
    settings = loaded_settings(folder, text).settings
    checks = hook_command if settings.hook else task_command
    with pytest.raises(UserError, match=message):
        checks(settings, folder, dict(os.environ))


def test_a_task_gets_no_terminal_variables_and_the_variables_of_the_workspace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    monkeypatch.setenv("LR", "ours")
    environment, notes = task_environment(loaded_settings(folder, "env: {LR: 3e-4, N: 2}").settings)
    assert notes == []
    assert "TMUX" not in environment
    assert (environment["LR"], environment["N"]) == ("3e-4", "2")


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/opt/venv/bin/python -u", "~/env"])
def test_without_conda_its_environment_is_only_noted_where_the_interpreter_is_absolute(
    folder: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(prepare_sweep, "find_tools", lambda _: [])
    monkeypatch.setattr(prepare_sweep, "find_tools", lambda _: [])
    _, notes = task_environment(loaded_settings(folder, f"conda_env: torch\npython_env: {python}").settings)
    assert len(notes) == 1
    assert (
        f"conda_env 'torch' is not activated: conda, mamba and micromamba were not found; tasks run {python}"
        in notes[0]
    )
    for other in ("python", ".venv"):
        with pytest.raises(UserError, match="were not found"):
            task_environment(loaded_settings(folder, f"conda_env: torch\npython_env: {other}").settings)


def test_a_missing_conda_environment_is_a_mistake_with_any_interpreter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONDA_EXE", str(Installation(tmp_path / "miniconda").tool))
    with pytest.raises(UserError, match="there is no conda environment 'torch'"):
        task_environment(loaded_settings(folder, f"conda_env: torch\npython_env: {sys.executable}").settings)
