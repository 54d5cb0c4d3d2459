"""`gpuyard uninstall` with a real queue, running jobs and leases."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.installation import find_installation
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.conftest import Script
from tests.integration.queue_fixture import end_leftovers, is_gone, until

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory with gpuyard's files at the default paths of the platform."""
    home = tmp_path / "user"
    for name, folder in (("HOME", home), ("TMPDIR", tmp_path / "tmp")):
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    for name in ("GPUYARD_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield home
    end_leftovers(state_of(home))


def state_of(user: Path) -> Path:
    return user / ".local/state/gpuyard"


def files_in(folder: Path) -> list[str]:
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)


def test_files_are_listed_kept_while_jobs_wait_and_then_removed(user: Path) -> None:
    for arguments in (
        ["submit", "--vram", "1G", "--", *GPUYARD, "sim-job", "--vram", "1G", "--seconds", "0"],
        ["batch", "--count", "2", "--gpus", "0", "--max-cpu", "100", "--min-free-mem-mb", "1", "--", "echo", "{seed}"],
        ["web", "--port", "0"],
        ["submit", "--hold", "--", "true"],
    ):
        assert run(*arguments).returncode == 0
    pid = running_pid(state_of(user) / "daemon.lock")
    assert pid is not None
    before = files_in(user)

    result = run("uninstall")
    assert (result.returncode, result.stderr) == (0, "")
    assert "first: jobs run or wait (1 held); wait for them, or end them" in result.stdout
    assert "Nothing was removed. `gpuyard uninstall --yes` removes these files." in result.stdout
    assert result.stdout.endswith(f"To remove the package itself: {find_installation().remove}\n")
    dry = json.loads(run("uninstall", "--dry-run", "--json").stdout)
    assert (dry["removed"], dry["stays"], dry["then"]) == (False, [], find_installation().remove)
    assert sum(place["files"] for place in dry["places"]) >= len(before)

    refused = run("uninstall", "--yes")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "gpuyard: nothing was removed: jobs run or wait (1 held)\n"
        "  wait for them, or end them with `gpuyard cancel all` and then `gpuyard wait all`\n"
    )
    assert set(before) <= set(files_in(user))
    assert running_pid(state_of(user) / "daemon.lock") == pid

    assert run("cancel", "all").returncode == 0
    gone = run("uninstall", "--yes")
    assert (gone.returncode, gone.stderr) == (0, "")
    assert gone.stdout.endswith(f"To remove the package itself: {find_installation().remove}\n")
    until(lambda: is_gone(pid), "the end of the daemon's process, after that of its lock")
    assert files_in(user) == []
    assert not state_of(user).exists()


def test_uninstall_is_refused_while_a_script_holds_a_gpu(user: Path, script: Script) -> None:
    holder = script(num_gpus=1)
    assert holder.stdout is not None
    holder.stdout.readline()
    result = run("uninstall", "--yes")
    assert result.returncode == 1
    assert f"your programs hold GPUs or wait for them (pid {holder.pid})" in result.stderr
    assert [name for name in files_in(user / ".gpu_locks") if name.endswith(".lease")] != []
    holder.communicate("\n")
    assert run("uninstall", "--yes").returncode == 0
    assert files_in(user) == []


def test_the_systemd_unit_is_stopped_before_its_file_is_removed(
    user: Path, tmp_path: Path, tools: Callable[[str, str], Path]
) -> None:
    calls = tmp_path / "calls"
    unit = user / ".config/systemd/user/gpuyard.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/x/gpuyard daemon run\n")
    tools(
        "systemctl",
        f"import os, sys\ncalls, unit = {str(calls)!r}, {str(unit)!r}\n"
        "print(sys.argv[1:], os.path.exists(unit), file=open(calls, 'a'))",
    )
    assert run("uninstall").returncode == 0
    assert not calls.exists()
    assert run("uninstall", "--yes").returncode == 0
    assert calls.read_text().splitlines() == [
        "['--user', 'disable', '--now', 'gpuyard.service'] True",
        "['--user', 'daemon-reload'] False",
    ]
    tools("systemctl", "raise SystemExit('no bus')")
    unit.write_text("[Service]\nExecStart=/x/gpuyard daemon run\n")
    result = run("uninstall", "--yes")
    assert result.returncode == 1
    assert "`systemctl --user disable --now gpuyard.service` failed: no bus" in result.stderr
    assert not unit.exists()


def test_dry_run_and_yes_together_are_an_error(user: Path) -> None:
    result = run("uninstall", "--yes", "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "gpuyard: --dry-run and --yes contradict each other\n  give one of them\n"
