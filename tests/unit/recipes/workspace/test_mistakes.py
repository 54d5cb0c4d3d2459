"""A mistake in a configuration is reported with its file, its line, its key, and a suggestion."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, load


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


def test_an_unknown_key_without_a_near_match_is_refused_with_all_keys(tmp_path: Path) -> None:
    hint = complaint(tmp_path, "zzz: 2\n").hint
    assert hint is not None
    assert "task_name, work_dir" in hint


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


def test_a_mistake_in_a_block_is_reported_with_its_own_line(tmp_path: Path) -> None:
    assert message_of(tmp_path, "env:\n  A: 1\n  B C: 2\n").startswith("3: `env` takes")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert message_of(tmp_path, "vram: 1G\ntask_name: a\nvram: 2G\n") == "3: `vram` is given twice, first on line 1"


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


def test_a_list_cannot_be_a_key(tmp_path: Path) -> None:
    assert message_of(tmp_path, "? [a]\n: 1\n") == "1: a list cannot be a key"


@pytest.mark.parametrize(
    ("text", "line"),
    [("task_name: a\nenv: {A: 1\n", 3), ("a: b: c\n", 1), ("a: 1\n---\nb: 2\n", 2), ("a: 'b\n\n\n", 4)],
)
def test_invalid_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    assert message_of(tmp_path, text).startswith(f"{line}: not YAML: ")


def test_a_tab_is_named_in_the_message(tmp_path: Path) -> None:
    error = complaint(tmp_path, "task_name: a\nenv:\n\tA: 1\n")
    assert f"{CONFIG_FILE}:3: " in error.message
    assert "indent with spaces, not with tabs" in str(error.hint)


def test_invalid_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
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
