"""Fault: one change of one file that causes a problem that a user would notice."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`old` occurs exactly once in `file` and is replaced by `new`; `breaks` is a sentence about the consequence.

    `near` are the tests that run first: files, or single tests as FILE::NAME. All paths are relative to the
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
        """A digest of what is planted, so that results of an earlier version are not reused. A file may be renamed."""
        return hashlib.blake2b(repr((self.id, self.old, self.new)).encode(), digest_size=8).hexdigest()

    def applied_to(self, source: str) -> str:
        """Return `source` with the fault planted. Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.id}: its old text occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)
