"""What `gpuyard doctor` says about limits of RAM that cannot be enforced."""

from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ui.cli.machine import doctor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(process: str) -> Path:
        raise EnvironmentFault(f"no cgroup for {process}", hint="do this")

    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "find_delegated", refuse)
    return tmp_path


def test_it_says_what_is_missing_if_limits_are_configured(home: Path) -> None:
    assert doctor.ram_limit_notices() == []
    (home / "config.toml").write_text("[host]\nenforce_ram = true\n")
    assert doctor.ram_limit_notices() == ["[host] enforce_ram has no effect: no cgroup for self (do this)"]
