"""The directories of the configuration and the state, and a configuration that cannot be read."""

import re
import sys
from pathlib import Path

import pytest

from gpuyard.config import config_dir, load_config, state_dir
from gpuyard.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUYARD_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize("unusable", [None, "", "  ", "relative/path", "~/path"])
@pytest.mark.parametrize(
    ("platform", "config", "state"),
    [
        ("linux", "/home/me/.config/gpuyard", "/home/me/.local/state/gpuyard"),
        ("darwin", *["/home/me/Library/Application Support/gpuyard"] * 2),
    ],
)
def test_the_default_is_the_platforms_directory(
    unusable: str | None, platform: str, config: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    if unusable is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", unusable)
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
    assert (config_dir(), state_dir()) == (Path(config), Path(state))


def test_absolute_directories_and_gpuyard_home_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x/config")
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    assert (config_dir(), state_dir()) == (Path("/x/config/gpuyard"), Path("/x/state/gpuyard"))
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    monkeypatch.setenv("GPUYARD_HOME", "~/gpuyard")
    assert config_dir() == state_dir() == Path("/home/me/gpuyard"), "gpuyard home takes precedence"


def test_a_file_that_cannot_be_opened_is_no_mistake_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path))
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(EnvironmentFault, match=re.escape("config.toml cannot be read: Is a directory")):
        load_config()
