"""The words by which keepers and supervisors report a program that has not begun, because of an error that passes.

Uses the standard library alone, as keepers and supervisors do.
"""

import errno
import os

from gpuyard.system.system_limits import remedy_of

_UNBEGUN = "unbegun"
# A launch of a slice that its keeper gave back.
RETURNED = "unbegun-returned"
_FAILURES = {
    "process": "no program can be started",
    "log": "no log can be written",
    "journal": "the keeper's journal cannot be written",
    "lease": "the keeper cannot take over a lease",
    "directory": "its directory cannot be entered",
    "input": "its input cannot be read",
    "output": "its output file cannot be written",
    "program": "its program cannot be read",
}
# Files that the job itself names: other jobs need not wait for them, unless the system lacks something.
_OF_THE_JOB = frozenset({"directory", "input", "output", "program"})
_OF_THE_SYSTEM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def unbegun_word(what: str, error: OSError) -> str:
    """Return a word such as `unbegun-log-enospc`. `what` is a key of `_FAILURES`."""
    return f"{_UNBEGUN}-{what}-{errno.errorcode.get(error.errno or 0, 'eio').lower()}"


def is_unbegun(word: str) -> bool:
    return word.partition("-")[0] == _UNBEGUN


def describe(word: str) -> tuple[str, str, bool]:
    """Return the text of such a word, its remedy, and whether it concerns this job's files only; empty for others."""
    _, what, name = (*word.split("-"), "", "")[:3]
    number = getattr(errno, name.upper(), None)
    if what not in _FAILURES or number is None:
        return "", "", False
    is_own = what in _OF_THE_JOB and number not in _OF_THE_SYSTEM
    return f"{_FAILURES[what]}: {os.strerror(number)}", remedy_of(OSError(number, "")) or "", is_own
