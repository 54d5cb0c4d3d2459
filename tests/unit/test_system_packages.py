"""`scripts/system-packages` beside another apt: with a stand-in for `apt-get`, and nothing else on PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.executables import write_executable

SCRIPT = Path(__file__).parents[2] / "scripts/system-packages"
LOCKED = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4242 (unattended-upgr)"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    for name in ("date", "chmod", "rm", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    write_executable(tmp_path / "id", "#!/bin/sh\necho 0\n")
    write_executable(tmp_path / "sleep", f"#!/bin/sh\necho sleep >> {tmp_path}/calls\n")
    return tmp_path


def install(tools: Path, apt_get: str) -> tuple[str, list[str]]:
    """Run the script with this `apt-get`; return its standard error, and the calls of apt-get and sleep."""
    write_executable(tools / "apt-get", f'#!/bin/sh\necho "$*" >> {tools}/calls\n{apt_get}\n')
    environment = {**os.environ, "PATH": str(tools), "CI": "false"}
    done = subprocess.run(["/bin/sh", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    return done.stderr, (tools / "calls").read_text().splitlines()


def test_it_says_that_it_waits_for_another_apt_and_waits(tools: Path) -> None:
    busy = f"[ -e {tools}/was-busy ] || {{ echo > {tools}/was-busy; echo '{LOCKED}' >&2; exit 100; }}"
    said, calls = install(tools, busy)
    assert said.startswith(f"waiting for up to 10 minutes: {LOCKED}\n")
    assert said.count("waiting") == 1
    assert calls[:3] == ["-o DPkg::Lock::Timeout=0 update -qq", "sleep", "-o DPkg::Lock::Timeout=600 update -qq"]
    assert calls[3].startswith("-o DPkg::Lock::Timeout=0 install -y -qq --no-install-recommends gcc tmux")


def test_it_gives_up_at_once_on_other_errors_and_says_why(tools: Path) -> None:
    said, calls = install(tools, "echo 'E: Unable to locate package' >&2; exit 100")
    assert said.startswith("E: Unable to locate package\n")
    assert "sleep" not in calls


def test_it_gives_up_after_ten_minutes(tools: Path) -> None:
    (tools / "date").unlink()
    write_executable(
        tools / "date", f"#!/bin/sh\necho x >> {tools}/ticks; set -- $(cat {tools}/ticks); echo $(($# * 200))\n"
    )
    said, calls = install(tools, f"echo '{LOCKED}' >&2; exit 100")
    assert calls.count("-o DPkg::Lock::Timeout=600 update -qq") == 2
    assert "missing: cc (Debian package gcc)" in said
