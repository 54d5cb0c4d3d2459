"""Xids in the kernel's log, for drivers that send no events and for `nvidia-smi`, which reports none.

Only messages written after the first call count: an earlier Xid may have been repaired since. Where this user may not
read `/dev/kmsg`, no Xid is known from there.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from gpuyard.probes.common.device_ids import pci_bus_id

# `NVRM: Xid (PCI:0000:65:00): 79, pid=1234, GPU has fallen off the bus.`; older drivers leave out `PCI:`.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\): (\d{1,4})\b")
_LONGEST_RECORD = 8192
# What is left for the next call, so that a flood of messages does not delay a reading.
_MOST_RECORDS = 1000
# Xids of one card.
MOST_REMEMBERED = 32


def find_xids(text: str) -> Iterator[tuple[str, int]]:
    """Yield the PCI bus id of the card and the number of each Xid in a text of the kernel's log."""
    for found in _XID.finditer(text):
        bus_id = pci_bus_id(f"{found[1]}.0")
        if bus_id is not None:
            yield bus_id, int(found[2])


class KernelLog:
    def __init__(self, root: Path = Path("/")) -> None:
        self._path = root / "dev/kmsg"
        self._descriptor: int | None = None
        self._is_open = False

    def new_xids(self) -> list[tuple[str, int]]:
        """Return the cards and Xids of messages since the last call; none at the first call. Never blocks."""
        if not self._is_open:
            self._open()
            return []
        return [] if self._descriptor is None else list(find_xids("\n".join(self._records(self._descriptor))))

    def _open(self) -> None:
        self._is_open = True
        with contextlib.suppress(OSError):  # not on this system, or not for this user
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def _records(self, descriptor: int) -> Iterator[str]:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(descriptor, _LONGEST_RECORD)
            except BrokenPipeError:  # messages were overwritten before we read them: the next call gets the oldest
                continue
            except OSError:  # nothing more
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")
