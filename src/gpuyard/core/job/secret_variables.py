"""Finds the environment variables whose values look secret: by their names, and URLs with a password in them.

A name that is wrongly taken for a secret costs little: its value is in the database only until the job has ended, and a
retry takes it from the shell that asks. A secret that is not found stays in the database.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

# TOKENIZERS_PARALLELISM, MAX_TOKENS, KEYMAP, PWD and AWS_REGION are no secrets.
_NAME = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(TOKEN|KEY|_PWD|_PASS|_PAT)(_|\d*$)", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def secret_variables(environment: Mapping[str, str], patterns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the variables that look secret, in order.

    `patterns` are further names, such as LAB_*, or with a "!" names that are no secrets; the last that matches counts.
    """
    return tuple(sorted(name for name, value in environment.items() if _is_secret(name, value, patterns)))


def _is_secret(name: str, value: str, patterns: Sequence[str]) -> bool:
    for pattern in reversed(patterns):
        if fnmatchcase(name, pattern.removeprefix("!")):
            return not pattern.startswith("!")
    return _has_secret_name(name) or ("://" in value and _URL_WITH_PASSWORD.search(value) is not None)


@functools.lru_cache(maxsize=4096)  # most submissions have the same names
def _has_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None
