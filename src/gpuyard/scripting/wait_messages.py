"""WaitMessages: tell the user what a program waits for, and when the wait ends."""

import contextlib
import sys
import time
from collections.abc import Callable

from gpuyard.core.lease import Lease, Need
from gpuyard.core.scheduling.wait_reasons import Reason, describe_wait, relevant_reasons
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_duration


class WaitMessages:
    """The messages of one wait: `write` gets a line when it starts and when it ends; none if there is no wait.

    `writes_changes`: also when the reason changes; `writes_figures`: also when only its amounts do.
    """

    def __init__(
        self,
        need: Need,
        here: Snapshot,
        write: Callable[[str], None],
        *,
        writes_changes: bool,
        writes_figures: bool = False,
    ) -> None:
        self._need = need
        self._names = {device.id: str(device.index) for device in here.devices if device.index is not None}
        self._write = write
        self._writes_changes, self._writes_figures = writes_changes, writes_figures
        self._written: object = None
        self._since = time.monotonic()

    @property
    def has_written(self) -> bool:
        return self._written is not None

    def report_wait(self, reasons: tuple[Reason, ...]) -> None:
        shown = relevant_reasons(self._need, reasons)
        line = f"gpuyard: {describe_wait(self._need, shown, self._names)}"
        key = line if self._writes_figures else [(each.kind, each.device_id, frozenset(each.holders)) for each in shown]
        if self._written is None or (self._writes_changes and key != self._written):
            self._written = key
            self._write(line)

    def report_end(self, lease: Lease) -> None:
        if self.has_written:
            gpus = ", ".join(self._names[share.device_id] for share in lease.shares)
            self._write(f"gpuyard: going on with GPU {gpus} after {format_duration(time.monotonic() - self._since)}")


def print_to_stderr(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed: the program goes on without messages
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
