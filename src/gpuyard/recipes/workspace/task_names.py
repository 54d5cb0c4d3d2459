"""What a workspace and its tasks are called: in the queue, in tmux, and in the file system.

A config is called by its file's name without the last suffix: `exp1.yml` is `exp1`. A name that has to be changed to be
used somewhere gets some digits of a digest of what it was, so that two names stay two.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.setting_types import has_control_characters

_LONGEST_SESSION = 80
# In bytes: a log may be called by both, with a few of its own, and a file's name has 255.
_LONGEST_CONFIG = 180
_LONGEST_SLUG = 60
_GPU = "{gpu}"


def config_name(path: Path) -> str:
    return path.stem


def check_config_names(paths: Sequence[Path]) -> None:
    """UserError where one cannot be used as a name, or two are called the same."""
    known: dict[str, Path] = {}
    for path in paths:
        name = config_name(path)
        _check_config_name(name, path)
        if name in known:
            raise UserError(
                f"{known[name].name} and {path.name} are both called '{name}'",
                hint="rename one: the marker, the log and the session are called by the name without its suffix",
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


def tag_of(workspace: Path) -> str:
    """By the folder itself, whatever link leads to it; no two folders have the same."""
    real = os.path.realpath(workspace)
    return f"{slug(os.path.basename(real))}-{_digest(real, 6)}"


def session_name(prefix: str, config: str) -> str:
    """A task's session, with `{gpu}` where its device will be named."""
    return f"{_for_tmux(f'{prefix}_{config}')}_{_GPU}"


def scheduler_session(task_name: str, suffix: str) -> str:
    return _for_tmux(f"{task_name}{suffix}")


def _for_tmux(name: str) -> str:
    """tmux takes `:` and `.` for its own in a name, `=`, `$` and `@` before one, and shows the unprintable as octal."""
    kept = _keep(name, "_-")
    return (
        kept if kept == name and len(kept) <= _LONGEST_SESSION else f"{kept[: _LONGEST_SESSION - 5]}-{_digest(name, 4)}"
    )


def slug(text: str) -> str:
    """For a part of a file's name, or a job's: as it is, where nothing in it could be taken for anything else."""
    kept = _keep(text, "_-.")
    if kept == text and len(kept.encode()) <= _LONGEST_SLUG:
        return kept
    return f"{kept.encode()[: _LONGEST_SLUG - 5].decode(errors='ignore')}-{_digest(text, 4)}"


def _keep(name: str, others: str) -> str:
    """Letters and digits of any language, and some others; the first is never one that makes an option or a hidden
    file."""
    kept = "".join(letter if letter.isalnum() or letter in others else "_" for letter in name)
    return f"_{kept[1:]}" if kept[:1] in ("", "-", ".") else kept


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(os.fsencode(text)).hexdigest()[:digits]
