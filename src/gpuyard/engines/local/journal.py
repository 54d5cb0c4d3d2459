"""The journal: one file to which all keepers of a queue append what they start and what ends."""

import os
from collections.abc import Iterator

from gpuyard.engines.local.keeper_connection import JournalEntry, parse_journal
from gpuyard.system.private_files import open_own

_LONG = 1 << 20
_PART = 1 << 16


class Journal:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.descriptor = open_own(path)
        os.fchmod(self.descriptor, 0o600)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all entries, in order. Only needed after a daemon or a keeper has died."""
        at = 0
        while text := os.pread(self.descriptor, _PART, at):
            entries, length = parse_journal(text)
            yield from entries
            if not length:
                return
            at += length

    def empty_if_long(self) -> None:
        """Call it only when all that it says is recorded."""
        if os.fstat(self.descriptor).st_size > _LONG:
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)
