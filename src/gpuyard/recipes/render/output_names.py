"""The folder name of a label. Pure; different labels never get the same name.

A plain name is unchanged. Characters that a folder name cannot have are percent-encoded as in a URL (`%2F`), and so is
`%` itself; a name that is too long is cut and ends in `%~` and a digest of the whole name, as no other name can.
"""

import hashlib
import os.path
import re

RESERVED = frozenset({"skipped.jsonl", "status.json"})
_LONGEST = 200  # bytes; file systems allow 255
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_DIGEST_LETTERS = 16


def folder_name(name: str) -> str:
    """Return the folder name for the label `name`, which is not empty."""
    if len(name) <= _LONGEST and _PLAIN.fullmatch(name) and name not in RESERVED:
        return name
    first = _escaped(name[0]) if name[0] == "." or name in RESERVED else _letter(name[0])
    whole = first + "".join(map(_letter, name[1:]))
    return whole if len(whole.encode()) <= _LONGEST else _shortened(whole)


def _letter(letter: str) -> str:
    return letter if letter.isprintable() and letter not in "/%" else _escaped(letter)


def _escaped(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode())


def _shortened(whole: str) -> str:
    end = f"%~{hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_LETTERS]}"
    return whole.encode()[: _LONGEST - len(end)].decode(errors="ignore") + end


def name_of_pair(scene: str | None, actor: str | None) -> str:
    """Return the prefix for labels without a name. The digest distinguishes equal file names in different folders."""
    stems = [_stem(path) for path in (scene, actor) if path is not None]
    digest = hashlib.sha256(repr((scene, actor)).encode()).hexdigest()[:8]
    return "-".join([*stems, digest])


def _stem(path: str) -> str:
    """Return the file name without its suffix; for a glob, the name of its folder."""
    folder, last = os.path.split(path.rstrip("/"))
    is_glob = folder and any(letter in last for letter in "*?[")
    return os.path.splitext(os.path.basename(folder) if is_glob else last)[0]
