"""The lines that tell what a script waits for, and when it goes on."""

import contextlib
import sys
import time
from collections.abc import Callable

from gpuyard.core.lease import Lease, Need
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.scheduling.wait_text import describe_wait, relevant_reasons
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_duration


class WaitMessages:
    """For one wait: a line when it begins and one when it ends, to stderr; nothing where it need not wait.

    `progress` gets these lines instead, and a new one when the reason changes. `quiet` leaves out stderr.
    """

    def __init__(self, need: Need, here: Snapshot, *, quiet: bool, progress: Callable[[str], None] | None) -> None:
        self._need = need
        self._names = {device.id: str(device.index) for device in here.devices if device.index is not None}
        self._tell = progress or (_tell_nobody if quiet else _print_to_stderr)
        self._tells_changes = progress is not None
        self._told: object = None
        self._since = time.monotonic()

    def wait(self, reasons: tuple[Reason, ...]) -> None:
        telling = relevant_reasons(self._need, reasons)
        # Figures change at each look; that alone is not worth another line.
        what = [(reason.kind, reason.device_id, frozenset(reason.holders)) for reason in telling]
        if self._told is None or (self._tells_changes and what != self._told):
            self._told = what
            self._tell(f"gpuyard: {describe_wait(self._need, telling, self._names)}")

    def go_on(self, lease: Lease) -> None:
        if self._told is not None:
            gpus = ", ".join(self._names[share.device_id] for share in lease.shares)
            self._tell(f"gpuyard: going on with GPU {gpus} after {format_duration(time.monotonic() - self._since)}")


def _tell_nobody(line: str) -> None:
    """For `quiet`."""


def _print_to_stderr(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, and the script goes on without it
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
