"""The files of a new workspace, made from the templates beside this module, which people may also copy by hand.

A line of the configuration that begins with `#` and a key shows that key's default; to set it is to take the `#` away.
"""

import json
import re
import shlex
from pathlib import Path

from gpuyard.recipes.workspace.settings import KINDS

CONFIG_TEMPLATE = Path(__file__).with_name("scheduler_config_template.yml")
WRAPPER_TEMPLATE = Path(__file__).with_name("scheduler_wrapper_template.sh")

_NEW_KEYS_HEAD = """\
#
# What can be set besides, each with its default:
"""
_COMMENTS_AT = 37


def scheduler_script(python: str) -> str:
    """`scheduler.sh`, with the interpreter to fall back on where `gpuyard` is not on PATH."""
    text = WRAPPER_TEMPLATE.read_text(encoding="utf-8")
    return text.replace("\npython=python3\n", f"\npython={shlex.quote(python)}\n", 1)


def configuration(task_name: str) -> str:
    """Every key, most of them as a comment with the default."""
    line = f"task_name: {json.dumps(task_name, ensure_ascii=False)}"
    before = '#task_name: ""'.ljust(_COMMENTS_AT)
    return _template().replace(before, line.ljust(_COMMENTS_AT), 1)


def with_new_keys(text: str) -> str:
    """A configuration with the keys that it does not mention added as comments; as it is, where it has all."""
    mentioned = set(re.findall(r"^\s*#?\s*['\"]?(\w+)['\"]?\s*:", text, re.MULTILINE))
    missing = [line for key, line in _lines().items() if key not in mentioned]
    if not missing:
        return text
    line_end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{line_end}{_NEW_KEYS_HEAD}{''.join(missing)}"


def _lines() -> dict[str, str]:
    """Each key's line of the template, as a comment."""
    found = {}
    for line in _template().splitlines():
        key = line.lstrip("#").partition(":")[0]
        if key in KINDS:
            found[key] = f"#{line.lstrip('#')}\n"
    return found


def _template() -> str:
    return CONFIG_TEMPLATE.read_text(encoding="utf-8")
