"""What Linux knows of NVIDIA cards without a call of the driver: the cards under /proc, and Xids in the kernel's log.

Only Xids written after the first call count: an earlier one may have been repaired since. Where this user may not read
`/dev/kmsg`, no Xid is known from there."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.kernel_files import names_in, read_text
from gpuyard.probes.parse_numbers import words


class KernelCard(Struct, frozen=True, kw_only=True):
    pci_bus_id: str | None
    uuid: str | None = None
    name: str | None = None


def list_kernel_cards(root: Path = Path("/")) -> tuple[KernelCard, ...]:
    """Return the cards in PCI bus order, which is NVIDIA's numbering."""
    folder, found = root / "proc/driver/nvidia/gpus", []
    for name in names_in(folder):
        lines = (read_text(folder / name / "information") or "").splitlines()
        facts = {key.strip(): words(value) for key, _, value in (line.partition(":") for line in lines)}
        uuid = facts.get("GPU UUID")
        # A card that was never initialised has question marks in its UUID.
        own = uuid if uuid and "?" not in uuid else None
        found.append(KernelCard(pci_bus_id=pci_bus_id(name), uuid=own, name=facts.get("Model")))
    return tuple(found)


# `NVRM: Xid (PCI:0000:65:00): 79, pid=1234, GPU has fallen off the bus.`; older drivers leave out `PCI:`.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\): (\d{1,4})\b")
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
            self._is_open = True
            with contextlib.suppress(OSError):  # not on this system, or not for this user
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._descriptor, 0, os.SEEK_END)
        elif self._descriptor is not None:
            return list(find_xids("\n".join(_records(self._descriptor))))
        return []


def _records(descriptor: int) -> Iterator[str]:
    for _ in range(1000):  # the rest at the next call, so that a flood of messages does not delay a reading
        try:
            record = os.read(descriptor, 8192)
        except BrokenPipeError:  # messages were overwritten before we read them: the next call gets the oldest
            continue
        except OSError:  # nothing more
            return
        if not record:
            return
        yield record.decode("utf-8", "replace")
