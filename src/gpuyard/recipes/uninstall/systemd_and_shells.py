"""Find what the docs tell users to add for gpuyard to systemd, cron and shells."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpuyard.engines.session.tmux import Tmux, TmuxError

UNIT = "gpuyard.service"
_TIMEOUT_S = 30.0
_MOST_BYTES = 1 << 20
_SHELL_FILES = (".bashrc", ".bash_profile", ".profile", ".zshrc", ".config/fish/config.fish")


def unit_files() -> list[Path]:
    """Return the user's unit, if it starts gpuyard, and the link that enables it."""
    units = _config_home() / "systemd" / "user"
    unit, enabled = units / UNIT, units / "default.target.wants" / UNIT
    if "gpuyard" not in _text(unit):
        return []
    return [path for path in (enabled, unit) if os.path.lexists(path)]


def stop_unit() -> str | None:
    """Stop and disable the user's unit. Return an error message, or None."""
    return _systemctl("disable", "--now", UNIT)


def reload_units() -> str | None:
    """Make systemd notice that the unit file is gone. Return an error message, or None."""
    return _systemctl("daemon-reload")


def completion_files() -> list[Path]:
    path = _config_home() / "fish" / "completions" / "gpuyard.fish"
    return [path] if "_GPUYARD_COMPLETE" in _text(path) else []


def open_sessions() -> list[str]:
    """Return the names of tmux sessions that gpuyard opened for tasks."""
    try:
        owned = Tmux(os.environ).owned_sessions("")
    except TmuxError:
        return []
    return sorted(name for names in owned.values() for name in names)


def lines_to_remove() -> Iterator[tuple[str, str]]:
    """Yield the user's files that have a line about gpuyard, each with advice."""
    for name in _SHELL_FILES:
        path = Path.home() / name
        if "gpuyard completion" in _text(path):
            yield str(path), "has a line with `gpuyard completion`: remove it by hand"
    if "gpuyard" in _crontab():
        yield "crontab", "has a line that starts gpuyard: remove it with `crontab -e`"


def _config_home() -> Path:
    named = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".config"


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _crontab() -> str:
    if shutil.which("crontab") is None:
        return ""
    try:
        done = subprocess.run(["crontab", "-l"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _systemctl(*arguments: str) -> str | None:
    command = ["systemctl", "--user", *arguments]
    if shutil.which(command[0]) is None:
        return None  # without systemd, the unit does not run
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(command)}` failed: {error}"
    if done.returncode:
        return f"`{' '.join(command)}` failed: {done.stderr.decode('utf-8', 'replace').strip()}"
    return None
