"""WaitMessages: tell the user what a script waits for, and when the wait ends."""

import contextlib
import sys
import time
from collections.abc import Callable

from gpuyard.core.lease import Lease, Need
from gpuyard.core.scheduling.wait_reasons import Reason, describe_wait, relevant_reasons
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_duration


class WaitMessages:
    """The messages of one wait: a line to stderr when it starts and when it ends; none if there is no wait.

    `progress` gets these lines in place of stderr, and another line when the reason changes. `quiet` turns off stderr.
    """

    def __init__(self, need: Need, here: Snapshot, *, quiet: bool, progress: Callable[[str], None] | None) -> None:
        self._need = need
        self._names = {device.id: str(device.index) for device in here.devices if device.index is not None}
        self._write = progress or (_discard if quiet else _print_to_stderr)
        self._writes_changes = progress is not None
        self._written: object = None
        self._since = time.monotonic()

    def report_wait(self, reasons: tuple[Reason, ...]) -> None:
        reasons = tuple(relevant_reasons(self._need, reasons))
        # Amounts change with every snapshot; that alone is not worth another line.
        key = [(reason.kind, reason.device_id, frozenset(reason.holders)) for reason in reasons]
        if self._written is None or (self._writes_changes and key != self._written):
            self._written = key
            self._write(f"gpuyard: {describe_wait(self._need, reasons, self._names)}")

    def report_end(self, lease: Lease) -> None:
        if self._written is not None:
            gpus = ", ".join(self._names[share.device_id] for share in lease.shares)
            self._write(f"gpuyard: going on with GPU {gpus} after {format_duration(time.monotonic() - self._since)}")


def _discard(line: str) -> None:
    """Ignore the line, for `quiet`."""


def _print_to_stderr(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed: the script goes on without messages
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
