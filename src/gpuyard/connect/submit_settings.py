"""What `[submit]` in config.toml says, for the commands that submit.

The whole configuration is checked by `gpuyard.config`, whose import takes longer than a submission: here only the keys
that are needed are read, and only if the file has them.
"""

from gpuyard.connect import paths
from gpuyard.connect.code_snapshot import SnapshotLimits
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.system.private_files import PrivateFileError, read_trusted
from gpuyard.system.snapshot_files import FOLDER
from gpuyard.system.user_directories import user_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SIZE_MB, _KEEP_FREE_MB = 256.0, 1024.0
_KEYS = (b"snapshot", b"min_free_disk")


class SubmitSettings:
    """`is_default`: submissions have a snapshot by default. `folder`: where snapshots are."""

    def __init__(self, *, is_default: bool, folder: str, limits: SnapshotLimits) -> None:
        self.is_default, self.folder, self.limits = is_default, folder, limits


def read_submit_settings() -> SubmitSettings:
    raw = _read()
    submit, host = raw.get("submit", {}), raw.get("host", {})
    try:
        size = _size_mb(submit.get("snapshot_size"), _SIZE_MB)
        keep_free = _size_mb(host.get("min_free_disk"), _KEEP_FREE_MB)
        named = submit.get("snapshot_folder")
        is_valid = isinstance(submit.get("snapshot", False), bool) and isinstance(named, str | None)
    except (UserError, AttributeError, TypeError):
        is_valid = False
    if not is_valid:
        _explain()
    import os

    folder = os.path.expanduser(named) if named else f"{paths.state_folder()}/{FOLDER}"
    return SubmitSettings(
        is_default=submit.get("snapshot", False), folder=folder, limits=SnapshotLimits(size, keep_free)
    )


def _size_mb(value: str | int | None, default_mb: float) -> float:
    """Return a size in MB. Without one nothing is parsed, which takes longer than to list a tree."""
    if value is None:
        return default_mb
    return parse_size(f"{value}B" if isinstance(value, int) else value)


def _read() -> "dict[str, Any]":
    path = f"{user_directory('XDG_CONFIG_HOME', '~/.config')}/config.toml"
    try:
        content = read_trusted(path)
    except (OSError, PrivateFileError):  # there is none; the daemon says what is wrong with it
        return {}
    if not any(key in content for key in _KEYS):
        return {}
    import tomllib

    try:
        return tomllib.loads(content.decode())
    except ValueError:
        _explain()
        raise


def _explain() -> None:
    """Raise UserError with what is wrong in the configuration."""
    from gpuyard.config import load_config

    load_config()
    raise UserError("[submit] in config.toml cannot be read", hint="see docs/reference/configuration.md")
