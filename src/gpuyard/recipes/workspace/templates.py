"""Fill in the files of a new workspace from the templates beside this module, which users may also copy by hand.

A line of the configuration that starts with `#` and a key shows that key's default; removing the `#` sets it.
"""

import json
import re
import shlex
from pathlib import Path

from gpuyard.recipes.workspace.settings import SETTING_TYPES

CONFIG_TEMPLATE = Path(__file__).with_name("scheduler_config_template.yml")
WRAPPER_TEMPLATE = Path(__file__).with_name("scheduler_wrapper_template.sh")

_NEW_KEYS_HEAD = """\
#
# More settings, each with its default:
"""
_COMMENTS_AT = 37


def scheduler_script(python: str) -> str:
    """Return `scheduler.sh` with the interpreter that it falls back on when `gpuyard` is not on PATH."""
    text = WRAPPER_TEMPLATE.read_text(encoding="utf-8")
    return text.replace("\npython=python3\n", f"\npython={shlex.quote(python)}\n", 1)


def config_text(task_name: str) -> str:
    """Return a configuration with every key, most of them as a comment with the default."""
    line = f"task_name: {json.dumps(task_name, ensure_ascii=False)}"
    before = '#task_name: ""'.ljust(_COMMENTS_AT)
    return _template().replace(before, line.ljust(_COMMENTS_AT), 1)


def add_missing_keys(text: str) -> str:
    """Return a configuration with the keys that it does not mention appended as comments."""
    mentioned = set(re.findall(r"^\s*#?\s*['\"]?(\w+)['\"]?\s*:", text, re.MULTILINE))
    missing = [line for key, line in _lines().items() if key not in mentioned]
    if not missing:
        return text
    line_end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{line_end}{_NEW_KEYS_HEAD}{''.join(missing)}"


def _lines() -> dict[str, str]:
    """Return the template's line for each key, as a comment."""
    found = {}
    for line in _template().splitlines():
        key = line.lstrip("#").partition(":")[0]
        if key in SETTING_TYPES:
            found[key] = f"#{line.lstrip('#')}\n"
    return found


def _template() -> str:
    return CONFIG_TEMPLATE.read_text(encoding="utf-8")
