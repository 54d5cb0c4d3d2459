"""The framework that a command's script imports."""

from pathlib import Path

import pytest

from gpuyard.client.submitted_code import framework_of


@pytest.mark.parametrize(
    ("script", "framework"),
    [
        ("import torch\n", "torch"),
        ("from transformers import AutoModel\n", "torch"),
        ("import torch\nimport jax.numpy as jnp\n", "jax"),
        ("def main():\n    import cupy\n", "cupy"),
        ("import numpy\n", ""),
    ],
)
def test_the_imports_of_the_script_say_which_framework_it_uses(tmp_path: Path, script: str, framework: str) -> None:
    (tmp_path / "train.py").write_text(script)
    assert framework_of(["python", "train.py", "--lr", "1"], str(tmp_path)) == framework


def test_without_a_script_that_can_be_read_no_framework_is_known(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for command in (["python", "-m", "train"], ["python", "missing.py"], ["python", "folder.py"], []):
        assert framework_of(command, str(tmp_path)) == ""
