"""Fault: one change of one file that breaks something a user would notice."""

import hashlib
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`old` occurs exactly once in `file` and is replaced by `new`; `breaks` says in a sentence what goes wrong then.

    `near` are tests that are tried first: files, or single tests as FILE::NAME. All paths are relative to the
    repository's root.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    near: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Differs when anything about the fault has changed, so that old results are not taken for new ones."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=8).hexdigest()

    def applied_to(self, source: str) -> str:
        """Return `source` with the fault in it. Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.id}: its old text occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)
