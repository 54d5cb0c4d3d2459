"""Patterns of `--output` and `--error`: placeholders, and files that jobs would share."""

from typing import Any

import pytest

from gpuyard.errors import UserError
from gpuyard.model.placeholders import fill_pattern
from gpuyard.model.submission import SubmissionRequest, parse_submission

OWN = {
    "job": "17", "array": "12", "index": "5", "name": "train", "attempt": "2", "user": "ada", "host": "box",
}  # fmt: skip


def submit(cwd: str = "/data", table: str | None = None, **options: Any) -> None:
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    names = [text.partition("=")[0] for text in options.get("sweep", ())]
    command = ("run", *map("{{{}}}".format, names))
    parse_submission(SubmissionRequest(cwd=cwd, command=command, table=table, options=typed))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("plain.txt", "plain.txt"), ("%x-%A_%a.out", "train-12_5.out"),
        ("%4a/%12j/%u@%N", "0005/000000000017/ada@box"), ("100%%.txt", "100%.txt"),
        ("{name}/{job}.{attempt}.{index}", "train/17.2.5"), ("{lr}.{name}", "1e-3/a.train"),
        ("{job}%j", "1717"), ("{seed}", "%j{job}"),
    ],
)  # fmt: skip
def test_placeholders_are_those_of_slurm_and_of_commands(pattern: str, path: str) -> None:
    assert fill_pattern(pattern, OWN, {"lr": "1e-3/a", "seed": "%j{job}"}) == path


def test_a_value_wins_over_a_name_that_every_job_has_and_bytes_become_question_marks() -> None:
    assert fill_pattern("{name}%x{odd}", OWN, {"name": "column", "odd": "\udcff"}) == "columntrain?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "%q"}, "--output: there is no placeholder %q"),
        ({"output": "x%"}, "--output: there is no placeholder %"),
        ({"error": "{lr}"}, "--error: there is no placeholder {lr}"),
        ({"output": "%a"}, "--output: this job has no index"),
        ({"output": ""}, "--output '' names no file"),
        ({"output": "logs/"}, "--output 'logs/' names no file"),
        ({"output": "~/x"}, "--output ~/x: only a shell replaces ~"),
        ({"output": "a\nb"}, "--output takes plain text"),
        ({"output": "a", "cwd": "/caf\udce9"}, "--output starts in the job's folder, and the name"),
        ({"output": "a", "log_cap": "1M"}, "--log-cap cannot be used with --output: gpuyard does not"),
        ({"error": "a", "split_stderr": True}, "--error and --split-stderr both say where standard error goes"),
        ({"output": "a", "array": "0-1"}, "all jobs would write to the same file: --output a"),
        ({"error": "{attempt}%A", "array": "0-1"}, "all jobs would write to the same file"),
        ({"output": "{lr}", "sweep": ["lr=1,2", "seed=0-4"]}, "all jobs would write to the same file: --output {lr}"),
        ({"output": "{job}", "table": "job\n1\n1\n"}, "all jobs would write to the same file"),
        ({"output": "%N", "engine": "slurm"}, "--output: the file has to be known before slurm chooses the machine"),
        ({"error": "{host}", "engine": "ray"}, "--error: the file has to be known before ray chooses the machine"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        submit(**options)
    assert refusal.value.message.startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"output": "a"},
        {"output": "a", "split_stderr": True, "log_cap": "1M"},
        {"output": "a", "error": "a"},
        {"output": "%j", "error": "e", "timestamps": True, "engine": "slurm"},
        {"output": "/x/%a", "cwd": "/caf\udce9", "array": "0-999999"},
        {"output": "%j", "array": "0-1"},
        {"output": "{lr}-{seed}", "sweep": ["lr=1,2", "seed=0-4"]},
        {"output": "{lr}", "table": "lr,seed\n1,1\n2,1\n"},
    ],
)
def test_a_pattern_with_a_file_for_each_job_is_accepted(options: dict[str, Any]) -> None:
    submit(**options)
