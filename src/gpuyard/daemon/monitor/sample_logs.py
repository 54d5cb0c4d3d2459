"""Write the sample logs of batches: the values that their gates saw at each sample and each launch."""

import logging
from collections.abc import Sequence
from pathlib import Path

from msgspec import to_builtins

from gpuyard.control.batch_gates import GateSample
from gpuyard.errors import GpuyardError
from gpuyard.probes.sample_log import RowLog

_log = logging.getLogger(__name__)
COLUMNS = GateSample.__struct_fields__
_DECIMALS = 2


class SampleLogs:
    """A log that cannot be written is reported once and retried at the next sample. No run waits for it."""

    def __init__(self) -> None:
        self._logs: dict[str, RowLog] = {}
        self._failed: set[str] = set()

    def write(self, rows: Sequence[tuple[str, GateSample]]) -> None:
        """Append each row to the log at its path."""
        for path in {path for path, _ in rows}:
            try:
                if path not in self._logs:
                    self._logs[path] = RowLog(Path(path), COLUMNS)
                self._logs[path].write_rows([_as_dict(row) for each, row in rows if each == path])
                self._failed.discard(path)
            except GpuyardError as error:
                if path not in self._failed:
                    _log.warning("%s; its rows are lost until it can be written", error)
                self._failed.add(path)


def _as_dict(row: GateSample) -> dict[str, object]:
    return {
        name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in to_builtins(row).items()
    }
