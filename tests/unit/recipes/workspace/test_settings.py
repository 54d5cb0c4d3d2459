"""The settings of a workspace, and the source of each value."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.settings import (
    CONFIG_FILE,
    SETTING_TYPES,
    LoadedSettings,
    TaskOptions,
    load,
    load_task_options,
)

# A configuration of a shell scheduler: only these keys.
LEGACY = """\
task_name: "TASK"
work_dir: "."
config_dir: "configs"
script_path: "train.py"
python_env: "python"
output_dir: "out"
scheduler_session_suffix: "_scheduler"
worker_prefix: ""
max_jobs_per_gpu: 3
gpu_count: 8
check_interval: 10
startup_delay: 2
command_delay: 0.25
log_dir: "/var/log/sweeps"
enable_logging: true
conda_env: ""
cuda_visible_devices_var: "CUDA_VISIBLE_DEVICES"
config_pattern: "*.yaml"
auto_restart_failed: true
max_retries: 5
cleanup_on_complete: yes
"""


def loaded(workspace: Path, text: str) -> LoadedSettings:
    workspace.mkdir(exist_ok=True)
    (workspace / CONFIG_FILE).write_text(text, encoding="utf-8")
    return load(workspace)


def test_an_empty_file_is_a_valid_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "my_experiment"
    settings = loaded(folder, "").settings
    assert (settings.task_name, settings.worker_prefix) == ("my_experiment", "my_experiment")
    assert (settings.work_dir, settings.config_dir) == (str(folder), f"{folder}/configs")
    assert (settings.script_path, settings.output_dir) == (f"{folder}/train.py", f"{folder}/out")
    assert (settings.max_jobs_per_gpu, settings.gpu_count, settings.config_pattern) == (2, None, "*.yml")
    assert (settings.auto_restart_failed, settings.max_retries, settings.env) == (False, 3, {})


def test_the_configuration_of_a_shell_scheduler_is_understood(tmp_path: Path) -> None:
    settings = loaded(tmp_path, LEGACY).settings
    assert (settings.task_name, settings.worker_prefix) == ("TASK", "TASK")
    assert (settings.max_jobs_per_gpu, settings.gpu_count, settings.max_retries) == (3, 8, 5)
    assert (settings.check_interval, settings.startup_delay, settings.command_delay) == (10.0, 2.0, 0.25)
    assert (settings.log_dir, settings.config_pattern) == ("/var/log/sweeps", "*.yaml")
    assert settings.auto_restart_failed
    assert settings.cleanup_on_complete
    assert settings.conda_env is None
    assert settings.work_dir == str(tmp_path)


def test_usual_spellings_of_values_are_understood(tmp_path: Path) -> None:
    text = (
        "vram: 8G\ntimeout: 4h\npriority: -5\nengine: Slurm\nsessions: none\ngpu_count: all\n"
        "notify: mail -s 'all done' me\nconda_env: torch\n"
    )
    settings = loaded(tmp_path, text).settings
    assert (settings.vram, settings.timeout, settings.priority) == (8192.0, 14400.0, -5)
    assert (settings.engine, settings.sessions, settings.gpu_count) == ("slurm", "none", None)
    assert settings.notify == ("mail", "-s", "all done", "me")
    assert settings.conda_env == "torch"
    assert loaded(tmp_path, "notify: [sh, -c, 'echo $HOME | cat']").settings.notify == ("sh", "-c", "echo $HOME | cat")
    text = "env:\n  LR: 1e-3\n  DEBUG: yes\n  CODE: 007\n  QUOTED: '$(x)'\n  EMPTY:\n"
    assert loaded(tmp_path, text).settings.env == {
        "LR": "1e-3",
        "DEBUG": "yes",
        "CODE": "007",
        "QUOTED": "$(x)",
        "EMPTY": "",
    }
    settings = loaded(tmp_path, "task_name: &name night\nworker_prefix: *name\n").settings
    assert settings.worker_prefix == "night"
    settings = loaded(tmp_path, "max_jobs_per_gpu: '4'\ntask_name: 007\nvram: 512\n").settings
    assert (settings.max_jobs_per_gpu, settings.task_name, settings.vram) == (4, "007", 512.0)


@pytest.mark.parametrize("empty", ["", "~", "null", "''", '" "'])
def test_an_empty_value_is_the_default(tmp_path: Path, empty: str) -> None:
    found = loaded(tmp_path, f"max_retries: {empty}\nvram: {empty}\ntask_name: {empty}\n")
    assert (found.settings.max_retries, found.settings.vram) == (3, None)
    assert found.settings.task_name == tmp_path.name
    assert found.sources["max_retries"] == "default"


def test_paths_are_relative_absolute_or_in_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = "work_dir: ../code\nconfig_dir: /data/configs\noutput_dir: ~/out\nlog_dir: ./$LOGS\nconda_env: ./env\n"
    settings = loaded(tmp_path / "ws", text).settings
    assert settings.work_dir == f"{tmp_path}/ws/../code"
    assert settings.config_dir == "/data/configs"
    assert settings.output_dir == "/home/ada/out"
    assert settings.log_dir == f"{tmp_path}/ws/$LOGS"
    assert settings.conda_env == f"{tmp_path}/ws/env"


def test_a_script_is_found_in_the_workspace_first_and_then_in_the_working_directory(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    text = f"work_dir: {code}\nscript_path: main.py\n"
    here = tmp_path / "ws" / "main.py"
    assert loaded(tmp_path / "ws", text).settings.script_path == str(here)
    (code / "main.py").touch()
    assert loaded(tmp_path / "ws", text).settings.script_path == f"{code}/main.py"
    here.touch()
    assert loaded(tmp_path / "ws", text).settings.script_path == str(here)


def test_each_value_has_its_source(tmp_path: Path) -> None:
    sources = loaded(tmp_path, "# mine\ntask_name: a\n\nmax_retries: 1\n").sources
    assert sources["task_name"] == f"{CONFIG_FILE}:2"
    assert sources["max_retries"] == f"{CONFIG_FILE}:4"
    assert sources["worker_prefix"] == "default, from task_name"
    assert sources["work_dir"] == "default, from the workspace"
    assert sources["vram"] == "default"
    assert loaded(tmp_path, "").sources["task_name"] == "default, from the folder's name"


def test_all_keys_are_shown_in_their_usual_spelling(tmp_path: Path) -> None:
    text = "vram: 1.5G\nenv: {A: b c, D: 1}\nnotify: [mail, a b]\nenable_logging: no\ngpu_count: 4\n"
    rows = {key: value for key, value, _ in loaded(tmp_path, text).rows()}
    assert list(rows) == list(SETTING_TYPES)
    assert rows["vram"] == "1.5 GB"
    assert rows["env"] == "A='b c' D=1"
    assert rows["notify"] == "mail 'a b'"
    assert (rows["enable_logging"], rows["gpu_count"], rows["command_delay"]) == ("false", "4", "0.5")
    rows = {key: value for key, value, _ in loaded(tmp_path, "").rows()}
    assert (rows["vram"], rows["gpu_count"], rows["timeout"], rows["env"]) == ("learned", "all", "none", "none")


def test_another_file_can_be_the_configuration(tmp_path: Path) -> None:
    other = tmp_path / "night.yml"
    other.write_text("task_name: night\n")
    found = load(tmp_path, other)
    assert found.settings.task_name == "night"
    assert found.sources["task_name"] == "night.yml:1"
    assert found.path == str(other)
    assert found.workspace == tmp_path
    assert found.settings.config_dir == f"{tmp_path}/configs"


def test_an_unusable_folder_name_gives_a_usable_task_name(tmp_path: Path) -> None:
    odd = tmp_path / f"two\nlines{'é' * 100}"
    name = loaded(odd, "").settings.task_name
    assert name.startswith("two_linesé")
    assert len(name.encode()) <= 180


@pytest.mark.linux("file names that are not UTF-8")
def test_a_folder_name_that_is_not_text_gives_a_valid_task_name(tmp_path: Path) -> None:
    broken = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert loaded(broken, "").settings.task_name == "?"


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"\xef\xbb\xbftask_name: a\r\nmax_retries: 1\r\n")
    assert load(tmp_path).settings.task_name == "a"


def test_a_folder_without_a_configuration_is_not_a_workspace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a workspace") as caught:
        load(tmp_path / "a b")
    assert caught.value.hint == f"`gpuyard workspace init '{tmp_path}/a b'` creates one"
    with pytest.raises(UserError, match=r"there is no file .*other\.yml"):
        load(tmp_path, tmp_path / "other.yml")


def complaint(folder: Path, content: str | bytes) -> UserError:
    path = folder / CONFIG_FILE
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.message.startswith(f"{path}:")
    return caught.value


def message_of(folder: Path, content: str | bytes) -> str:
    """Return the message without the path of the file: `LINE: text`."""
    return complaint(folder, content).message.replace(f"{folder / CONFIG_FILE}:", "")


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("max_job_per_gpu", "max_jobs_per_gpu"),
        ("Max-Retries", "max_retries"),
        ("timout", "timeout"),
        ("outputdir", "output_dir"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_key(tmp_path: Path, wrong: str, suggested: str) -> None:
    error = complaint(tmp_path, f"task_name: a\n{wrong}: 2\n")
    assert error.message.endswith(f"{CONFIG_FILE}:2: there is no key `{wrong}`")
    assert error.hint == f"did you mean `{suggested}`?"


def test_a_key_that_is_unknown_repeated_or_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    hint = complaint(tmp_path, "zzz: 2\n").hint
    assert hint is not None
    assert "task_name, work_dir" in hint
    assert message_of(tmp_path, "env:\n  A: 1\n  B C: 2\n").startswith("3: `env` takes")
    assert message_of(tmp_path, "vram: 1G\ntask_name: a\nvram: 2G\n") == "3: `vram` is given twice, first on line 1"
    assert message_of(tmp_path, "? [a]\n: 1\n") == "1: a list cannot be a key"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_jobs_per_gpu: many", "`max_jobs_per_gpu` takes a whole number of 1 or more, not 'many'"),
        ("max_jobs_per_gpu: 0", "`max_jobs_per_gpu` takes a whole number of 1 or more, not '0'"),
        ("max_jobs_per_gpu: 1.5", "`max_jobs_per_gpu` takes a whole number of 1 or more, not '1.5'"),
        ("max_retries: -1", "`max_retries` takes a whole number of 0 or more, not '-1'"),
        ("max_retries: [1]", "`max_retries` takes a whole number of 0 or more, not a list"),
        ("gpu_count: -1", "`gpu_count` takes `all` or a whole number of 0 or more, not '-1'"),
        ("gpu_count: {}", "`gpu_count` takes `all` or a whole number of 0 or more, not keys with values"),
        ("check_interval: 0", "`check_interval` takes a time of more than 0, such as 30, 30s or 4h, not '0'"),
        ("startup_delay: -1", "`startup_delay` takes a time such as 30, 30s or 4h, not '-1'"),
        ("timeout: soon", "`timeout` takes a time of more than 0, such as 30, 30s or 4h, not 'soon'"),
        ("vram: lots", "`vram` takes a size such as 8G, or a number of MB, not 'lots'"),
        ("vram: 0", "`vram` takes a size such as 8G, or a number of MB, not '0'"),
        ("enable_logging: maybe", "`enable_logging` takes true or false, not 'maybe'"),
        ("engine: my cloud", "`engine` takes default, or the name of an engine: local, slurm, ray, not 'my cloud'"),
        ("parser: parse_config", "`parser` takes MODULE:FUNCTION, such as my_args:parse_config, not 'parse_config'"),
        ("parser: 'a:b()'", "`parser` takes MODULE:FUNCTION, such as my_args:parse_config, not 'a:b()'"),
        ("sessions: screen", "`sessions` takes tmux or none, not 'screen'"),
        ("priority: high", "`priority` takes a whole number from -1000000 to 1000000, not 'high'"),
        ("task_name: a/b", "`task_name` takes a name of at most 180 bytes in one line, without `/`, not 'a/b'"),
        ("work_dir: [a]", "`work_dir` takes text, not a list"),
        ("work_dir: !include x", "`work_dir` takes text, not a value with the tag !include"),
        (
            "cuda_visible_devices_var: 2x",
            "`cuda_visible_devices_var` takes the name of an environment variable, not '2x'",
        ),
        ("env: text", "`env` takes names of environment variables with their values, each name once, not 'text'"),
        ("env: {a b: 1}", "`env` takes names of environment variables with their values, each name once, not 'a b'"),
        ("env: {A: 1, A: 2}", "`env` takes names of environment variables with their values, each name once, not 'A'"),
        ("env: {A: [1]}", "`env` takes names of environment variables with their values, each name once, not a list"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_expected_type(tmp_path: Path, line: str, message: str) -> None:
    assert message_of(tmp_path, f"# first\n\n{line}\n") == f"3: {message}"


@pytest.mark.parametrize("text", ["make | tee log", "it's", "a > b", "\"''\"", "[]", "[a, [b]]", "{a: b}"])
def test_a_shell_expression_is_not_accepted_as_a_command(tmp_path: Path, text: str) -> None:
    assert message_of(tmp_path, f"notify: {text}\n").startswith("1: `notify` takes a command")


@pytest.mark.parametrize("text", ["/data/*.yml", "../*.yml", "[a]"])
def test_a_pattern_must_match_file_names(tmp_path: Path, text: str) -> None:
    assert "`config_pattern` takes a pattern of file names" in message_of(tmp_path, f"config_pattern: {text}\n")


def test_all_mistakes_are_reported_together_in_order_of_lines(tmp_path: Path) -> None:
    lines = complaint(tmp_path, "max_retries: x\ntask_nam: a\nvram: y\n").message.splitlines()
    path = tmp_path / CONFIG_FILE
    assert lines == [
        f"{path}:1: `max_retries` takes a whole number of 0 or more, not 'x'",
        f"{path}:2: there is no key `task_nam` (did you mean `task_name`?)",
        f"{path}:3: `vram` takes a size such as 8G, or a number of MB, not 'y'",
    ]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n"])
def test_a_document_without_keys_and_values_is_refused(tmp_path: Path, text: str) -> None:
    assert "expected keys with values" in message_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [("task_name: a\nenv: {A: 1\n", 3), ("a: b: c\n", 1), ("a: 1\n---\nb: 2\n", 2), ("a: 'b\n\n\n", 4)],
)
def test_invalid_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    assert message_of(tmp_path, text).startswith(f"{line}: not YAML: ")


def test_tabs_and_invalid_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    error = complaint(tmp_path, "task_name: a\nenv:\n\tA: 1\n")
    assert f"{CONFIG_FILE}:3: " in error.message
    assert "indent with spaces, not with tabs" in str(error.hint)
    assert message_of(tmp_path, b"task_name: a\nlog_dir: caf\xe9\n") == "2: not UTF-8 text"


@pytest.mark.parametrize(
    "text", ["a: \x01\n", "[" * 100_000, "a: " + "{a: " * 50_000, "&a [*a]\n", 'task_name: "\\0"\n']
)
def test_pathological_yaml_is_refused_like_any_mistake(tmp_path: Path, text: str) -> None:
    assert complaint(tmp_path, text)


def test_yaml_tags_are_never_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert "tag" in message_of(tmp_path, f"work_dir: !!python/object/apply:os.mkdir ['{trace}']\n")
    assert not trace.exists()


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 50 << 30])
def test_a_file_of_more_than_1_mb_is_refused_and_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / CONFIG_FILE
    path.write_text("task_name: a\n")
    os.truncate(path, size)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert caught.value.message == f"{path} is too large: configuration has at most 1 MB"
    assert caught.value.hint


def options(folder: Path, content: str | bytes) -> TaskOptions:
    path = folder / "exp1.yml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_task_options(path)


def test_a_task_can_have_its_own_options(tmp_path: Path) -> None:
    text = "lr: 1e-3\nscheduler:\n  vram: 12G\n  priority: 5\n  gpus: 0\n  timeout: 90m\n  env: {SEED: 1}\n"
    assert options(tmp_path, text) == TaskOptions(vram=12288.0, priority=5, gpus=0, timeout=5400.0, env={"SEED": "1"})
    assert options(tmp_path, "scheduler: {gpu_count: 0}\n") == TaskOptions(gpus=0, gpu_count=0)
    with pytest.raises(UserError, match=r"exp1.yml:1: `gpu_count: 0` and `gpus` exclude each other"):
        options(tmp_path, "scheduler: {gpus: 1, gpu_count: 0}\n")
    assert options(tmp_path, "scheduler:\n  vram:\n  gpus: 2\n") == TaskOptions(gpus=2)
    assert options(tmp_path, "scheduler: {gpus: 3}\n---\nscheduler: {gpus: 4}\n") == TaskOptions(gpus=3)


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1\n",
        "",
        "- scheduler\n",
        "scheduler:\n",
        "scheduler: cosine\n",
        "scheduler: [cosine, step]\n",
        "scheduler: {name: cosine, T_max: 100, eta_min: 0, gamma: 0.1, patience: 3, mode: min, warmup_steps: 5}\n",
        "model: {scheduler: {vram: lots}}\n",
    ],
)
def test_other_sections_are_left_to_the_program(tmp_path: Path, text: str) -> None:
    assert options(tmp_path, text) == TaskOptions()


@pytest.mark.parametrize(
    "text",
    [
        "scheduler: {vram: 8G\n",
        "{% if lr %}\nscheduler: {vram: 8G}\n",
        b"name: \xff\nscheduler: {vram: 8G}\n",
        "scheduler: " + "[" * 100_000,
    ],
)
def test_a_file_that_is_not_yaml_has_no_options(tmp_path: Path, text: str | bytes) -> None:
    assert options(tmp_path, text) == TaskOptions()


@pytest.mark.parametrize("size", [(1 << 20) + 1, 50 << 30])
def test_a_file_of_more_than_1_mb_is_data_and_cannot_have_options(tmp_path: Path, size: int) -> None:
    path = tmp_path / "exp1.yml"
    path.write_text("lr_scheduler: cosine\nscheduler:\n  step_size: 3\n")
    os.truncate(path, size)
    assert load_task_options(path) == TaskOptions()
    path.write_text("lr: 1\nscheduler:\n  vram: 8G\n")
    os.truncate(path, size)
    with pytest.raises(UserError, match=r"exp1\.yml is too large: a configuration with `scheduler:` has at most 1 MB"):
        load_task_options(path)


def test_yaml_tags_of_the_program_are_ignored_and_not_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = (
        f"base: !include other.yml\nsize: !!python/tuple [1, 2]\nrun: !!python/object/apply:os.mkdir ['{trace}']\n"
        "scheduler: {gpus: 1}\n"
    )
    assert options(tmp_path, text) == TaskOptions(gpus=1)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("vrm: 8G", "there is no key `vrm`", "did you mean `vram`?"),
        ("gpu: 1", "there is no key `gpu`", "did you mean `gpus`?"),
        (
            "vram: 8G\n  type: cosine",
            "there is no key `type`",
            "the keys are vram, priority, gpus, gpu_count, timeout, env",
        ),
        ("gpus: -1", "`gpus` takes a whole number of 0 or more, not '-1'", None),
        (
            "gpu_count: 2",
            "`gpu_count` takes 0, for work without a GPU (`gpus` is the number of a task's GPUs), not '2'",
            None,
        ),
        ("vram: lots", "`vram` takes a size such as 8G, or a number of MB, not 'lots'", None),
    ],
)
def test_a_mistake_in_the_scheduler_section_is_reported_with_its_line(
    tmp_path: Path, text: str, message: str, hint: str | None
) -> None:
    with pytest.raises(UserError) as caught:
        options(tmp_path, f"lr: 1\nscheduler:\n  {text}\n")
    line = 3 + text.count("\n")
    assert caught.value.message == f"{tmp_path}/exp1.yml:{line}: {message}"
    assert caught.value.hint == hint


def test_a_task_without_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_task_options(tmp_path / "gone.yml")
