"""Options in a task's own YAML, and the parts of it that belong to its program."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.settings import TaskOptions, load_task_options


def options(folder: Path, content: str | bytes) -> TaskOptions:
    path = folder / "exp1.yml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_task_options(path)


def test_a_task_can_have_its_own_options(tmp_path: Path) -> None:
    text = "lr: 1e-3\nscheduler:\n  vram: 12G\n  priority: 5\n  gpus: 0\n  timeout: 90m\n  env: {SEED: 1}\n"
    assert options(tmp_path, text) == TaskOptions(
        vram_mb=12288.0, priority=5, gpus=0, timeout_s=5400.0, env={"SEED": "1"}
    )


def test_gpu_count_0_is_work_without_a_gpu(tmp_path: Path) -> None:
    assert options(tmp_path, "scheduler: {gpu_count: 0}\n") == TaskOptions(gpus=0, gpu_count=0)
    with pytest.raises(UserError, match=r"exp1.yml:1: `gpu_count: 0` and `gpus` exclude each other"):
        options(tmp_path, "scheduler: {gpus: 1, gpu_count: 0}\n")


def test_an_option_without_a_value_counts_as_not_given(tmp_path: Path) -> None:
    assert options(tmp_path, "scheduler:\n  vram:\n  gpus: 2\n") == TaskOptions(gpus=2)


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


def test_the_first_of_several_documents_counts(tmp_path: Path) -> None:
    assert options(tmp_path, "scheduler: {gpus: 3}\n---\nscheduler: {gpus: 4}\n") == TaskOptions(gpus=3)


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
