"""Which tool runs containers."""

from pathlib import Path

import pytest

from gpuyard.engines.containers import choose_tool, installed_tools
from gpuyard.errors import UserError


@pytest.fixture
def path(tmp_path: Path) -> str:
    for tool in ("apptainer", "docker"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    return str(tmp_path)


def test_auto_takes_the_first_that_is_installed_and_a_configured_one_is_kept(path: str) -> None:
    assert installed_tools(path) == ["docker", "apptainer"]
    assert choose_tool("auto", path) == "docker"
    assert choose_tool("apptainer", path) == "apptainer"


def test_a_tool_that_is_missing_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="podman, the tool in") as error:
        choose_tool("podman", path)
    assert "docker or apptainer" in str(error.value.hint)
    with pytest.raises(UserError, match="none of them is on PATH"):
        choose_tool("auto", str(tmp_path / "nothing"))
