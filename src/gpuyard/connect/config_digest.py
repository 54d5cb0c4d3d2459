"""A digest of the configuration files that a command names, so that each configuration gets its own estimates.

Only regular files up to 1 MB count. Files that cannot be read are ignored: the job itself will report them. A command
that names no such file imports nothing.
"""

import os
import stat

_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
_MOST_BYTES = 1 << 20


def digest_of(command: list[str], cwd: str) -> str:
    """Return a digest of names and contents; empty if the command names no configuration file."""
    names = (argument.partition("=")[2] or argument for argument in command)  # x.yaml in `--config=x.yaml`
    named = [name for name in names if name.lower().endswith(_ENDINGS)]
    files = [(name, content) for name in named if (content := _read(os.path.join(cwd, name))) is not None]
    if not files:
        return ""
    from _blake2 import blake2b  # as in `hashlib`, without the milliseconds that OpenSSL takes to load

    digest = blake2b(digest_size=16)
    for name, content in files:
        digest.update(b"%d %d\0" % (len(name), len(content)))
        digest.update(os.fsencode(name))
        digest.update(content)
    return digest.hexdigest()


def _read(path: str) -> bytes | None:
    try:
        # A named pipe with such a name would block.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return None
