"""Log samples to a file, as CSV or JSON Lines by its suffix: one row for the host and one for each device.

Unknown is an empty cell in CSV and `null` in JSON Lines. All rows of a sample are appended in one write, so a reader
never sees half a sample. A full file is rotated (`usage.csv.1`, then `.2`, …), and so is a CSV file with other columns.
"""

import csv
import errno
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.machine_snapshot import Sample, device_as_dict, iso_time
from gpuyard.system.write_files import UnsafePathError, open_results

COLUMNS = (
    "taken_at", "kind", "id", "index", "vendor", "name", "memory_total_mb", "memory_used_mb", "memory_free_mb",
    "utilization_percent", "utilization_smoothed_percent", "power_draw_w", "power_smoothed_w", "power_limit_w",
    "temperature_c", "process_count", "healthy", "load_1m",
)  # fmt: skip
MAX_BYTES = 32 * 1024 * 1024
KEPT_FILES = 3


class RowLog:
    """A log file of rows with fixed columns, rotated at a maximum size."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        if path.suffix not in (".csv", ".jsonl"):
            raise UserError(f"cannot log to '{path}'", hint="name a file that ends in .csv or .jsonl")
        self._path = path
        self._columns = columns
        self._is_csv = path.suffix == ".csv"
        self._translate_errors(self._prepare)

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        buffer = io.StringIO()
        if self._is_csv:
            csv.DictWriter(buffer, self._columns, lineterminator="\n").writerows(rows)
        else:
            buffer.writelines(f"{json.dumps(row)}\n" for row in rows)
        self._translate_errors(lambda: self._append(buffer.getvalue().encode()))

    def _prepare(self) -> None:
        """Check that the file is writable, and rotate a CSV file with other columns."""
        os.close(self._open())
        if self._is_csv and self._path.stat().st_size:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                if file.readline().rstrip("\r\n") != ",".join(self._columns):
                    self._rotate()

    def _append(self, encoded: bytes) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(encoded) > MAX_BYTES:
            self._rotate()
            size = 0
        if self._is_csv and size == 0:
            encoded = f"{','.join(self._columns)}\n".encode() + encoded
        descriptor = self._open()
        try:
            if os.write(descriptor, encoded) < len(encoded):
                os.ftruncate(descriptor, size)  # a partial row would corrupt the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return open_results(os.path.join(os.getcwd(), self._path), makes_folders=False)

    def _rotate(self) -> None:
        for number in range(KEPT_FILES, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)

    def _translate_errors(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise EnvironmentFault(f"cannot log to '{self._path}': {error.strerror}") from error
        except UnsafePathError as error:
            raise EnvironmentFault(f"cannot log to '{self._path}': {error}", hint="name another file") from error


class SampleLog(RowLog):
    def __init__(self, path: Path) -> None:
        super().__init__(path, COLUMNS)

    def write(self, sample: Sample) -> None:
        self.write_rows(list(_rows(sample)))


def _rows(sample: Sample) -> Iterator[dict[str, Any]]:
    taken_at = iso_time(sample.snapshot.taken_at)
    host = sample.snapshot.host
    blank = dict.fromkeys(COLUMNS)
    used = None
    if host.memory_total_mb is not None and host.memory_available_mb is not None:
        used = round(host.memory_total_mb - host.memory_available_mb, 2)
    yield {
        **blank,
        "taken_at": taken_at,
        "kind": "host",
        "id": "host",
        "name": host.name,
        "memory_total_mb": host.memory_total_mb,
        "memory_used_mb": used,
        "memory_free_mb": host.memory_available_mb,
        "utilization_percent": host.cpu_percent,
        "utilization_smoothed_percent": _rounded(sample.cpu_percent),
        "load_1m": host.load_1m,
    }
    for device in sample.snapshot.devices:
        raw = device_as_dict(device)
        yield {
            **blank,
            **{column: raw[column] for column in COLUMNS if column in raw},
            "taken_at": taken_at,
            "kind": "device",
            "utilization_smoothed_percent": _rounded(sample.loads.get(device.id)),
            "power_smoothed_w": _rounded(sample.powers_w.get(device.id)),
            "process_count": None if device.processes is None else len(device.processes),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
