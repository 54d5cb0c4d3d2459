"""A digest of the configuration files that a command names, so that another configuration counts as another program.

Only small regular files count, and what cannot be read does not: the job itself will say so. Whoever names none pays
for no import.
"""

import os
import stat

_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
_MOST_BYTES = 1 << 20


def digest_of(words: list[str], cwd: str) -> str:
    """Of the names and the contents; empty where the command names none."""
    named = [name for word in words if (name := _name_in(word)).lower().endswith(_ENDINGS)]
    files = [(name, content) for name in named if (content := _read(os.path.join(cwd, name))) is not None]
    if not files:
        return ""
    from _blake2 import blake2b  # as `hashlib` has it, without the milliseconds that OpenSSL takes to load

    digest = blake2b(digest_size=16)
    for name, content in files:
        digest.update(b"%d %d\0" % (len(name), len(content)))
        digest.update(os.fsencode(name))
        digest.update(content)
    return digest.hexdigest()


def _name_in(word: str) -> str:
    """`--config=x.yaml` names x.yaml."""
    return word.partition("=")[2] or word


def _read(path: str) -> bytes | None:
    try:
        # Not to be held up by a pipe that is called so.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return None
