"""What a label's folder is called. Pure; two different labels never get one name.

A plain name is kept as it is. Letters that a folder's name cannot have are written as in a web address, `%2F`, and so
is `%` itself; a name that is too long ends in `%~` and a digest of all of it, which no other name can.
"""

import hashlib
import os.path
import re

RESERVED = frozenset({"skipped.jsonl", "status.json"})
_LONGEST = 200  # bytes; file systems allow 255
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_DIGEST_LETTERS = 16


def folder_name(name: str) -> str:
    """The same letters, where that can be; `name` is not empty."""
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
    """What labels without a name of their own are called after; the digest tells files of one name in two folders."""
    stems = [_stem(path) for path in (scene, actor) if path is not None]
    digest = hashlib.sha256(repr((scene, actor)).encode()).hexdigest()[:8]
    return "-".join([*stems, digest])


def _stem(path: str) -> str:
    """Of a glob, the folder that it looks in."""
    folder, last = os.path.split(path.rstrip("/"))
    is_glob = folder and any(letter in last for letter in "*?[")
    return os.path.splitext(os.path.basename(folder) if is_glob else last)[0]
