"""Names of a workspace and its tasks in the queue, in tmux, and in the file system.

A config is named after its file without the last suffix: `exp1.yml` is `exp1`. A name that must be changed for tmux or
for a file gets a few digits of the original's digest, so that different names stay different.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.setting_types import has_control_characters

_LONGEST_SESSION = 80
# In bytes: the name of a log may combine both with a few more, and a file name may have 255.
_LONGEST_CONFIG = 180
_LONGEST_SLUG = 60


def config_name(path: Path) -> str:
    return path.stem


def check_config_names(paths: Sequence[Path]) -> None:
    """Raise UserError if a config's name is unusable, or if two configs have the same name."""
    known: dict[str, Path] = {}
    for path in paths:
        name = config_name(path)
        _check_config_name(name, path)
        if name in known:
            raise UserError(
                f"{known[name].name} and {path.name} have the same name '{name}'",
                hint="rename one: marker, log and session are named after the file without its suffix",
            )
        known[name] = path


def _check_config_name(name: str, path: Path) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise UserError(f"the name of the config {path.name!a} is not UTF-8", hint="rename it")
    if has_control_characters(name):
        raise UserError(f"the name of the config {path.name!r} has control characters in it", hint="rename it")
    if len(name.encode()) > _LONGEST_CONFIG:
        raise UserError(
            f"the name of the config {path.name} is too long",
            hint=f"at most {_LONGEST_CONFIG} bytes without the suffix",
        )


def workspace_tag(workspace: Path) -> str:
    """Return the tag of a workspace: the same through any symbolic link, and different for each folder."""
    real = os.path.realpath(workspace)
    return f"{slug(os.path.basename(real))}-{_digest(real, 6)}"


def session_name(prefix: str, config: str) -> str:
    """Return the name of a task's session; `{gpu}` is the placeholder for its device."""
    return f"{_for_tmux(f'{prefix}_{config}')}_{{gpu}}"


def scheduler_session(task_name: str, suffix: str) -> str:
    return _for_tmux(f"{task_name}{suffix}")


def _for_tmux(name: str) -> str:
    """Return a safe session name. tmux gives `:` and `.` in a name, and `=`, `$` and `@` at its start, a meaning of its
    own, and shows unprintable characters as octal."""
    kept = _replace_unsafe(name, "_-")
    if kept == name and len(kept) <= _LONGEST_SESSION:
        return kept
    return f"{kept[: _LONGEST_SESSION - 5]}-{_digest(name, 4)}"


def slug(text: str) -> str:
    """Return a safe part of a file name or a job name; unchanged if `text` is short and has safe characters only."""
    kept = _replace_unsafe(text, "_-.")
    if kept == text and len(kept.encode()) <= _LONGEST_SLUG:
        return kept
    return f"{kept.encode()[: _LONGEST_SLUG - 5].decode(errors='ignore')}-{_digest(text, 4)}"


def _replace_unsafe(name: str, others: str) -> str:
    """Replace all characters but letters and digits of any language and `others` with `_`, and also a first character
    that would make an option or a hidden file."""
    kept = "".join(letter if letter.isalnum() or letter in others else "_" for letter in name)
    return f"_{kept[1:]}" if kept[:1] in ("", "-", ".") else kept


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(os.fsencode(text)).hexdigest()[:digits]
