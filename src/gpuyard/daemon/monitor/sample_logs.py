"""The sample logs of batches: what their gates saw at each look and at each launch."""

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
    """One that cannot be written is told of once, and tried again at the next look; no run waits for it."""

    def __init__(self) -> None:
        self._logs: dict[str, RowLog] = {}
        self._failed: set[str] = set()

    def write(self, rows: Sequence[tuple[str, GateSample]]) -> None:
        for path in {path for path, _ in rows}:
            told = [_as_dict(row) for where, row in rows if where == path]
            try:
                log = self._logs[path] if path in self._logs else self._open(path)
                log.write_rows(told)
                self._failed.discard(path)
            except GpuyardError as error:
                if path not in self._failed:
                    _log.warning("%s; what it was to say until it can be is lost", error)
                self._failed.add(path)

    def _open(self, path: str) -> RowLog:
        log = self._logs[path] = RowLog(Path(path), COLUMNS)
        return log


def _as_dict(row: GateSample) -> dict[str, object]:
    return {
        name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in to_builtins(row).items()
    }
