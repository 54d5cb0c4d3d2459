"""Log samples to a file, as CSV or JSON Lines by its suffix: one row for the host and one for each device.

Unknown is an empty cell in CSV and `null` in JSON Lines. All rows of a sample are appended in one write, so a reader
never sees half a sample. A full file is rotated (`usage.csv.1`, then `.2`, …), and so is a CSV file with other columns.
"""

import contextlib
import csv
import errno
import io
import itertools
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
        with self._explained():  # check that it can be written
            os.close(self._open())
            if self._is_csv and path.stat().st_size:
                with path.open(encoding="utf-8", errors="replace") as file:
                    if file.readline().rstrip("\r\n") != ",".join(columns):
                        self._rotate()

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        buffer = io.StringIO()
        if self._is_csv:
            csv.DictWriter(buffer, self._columns, lineterminator="\n").writerows(rows)
        else:
            buffer.writelines(f"{json.dumps(row)}\n" for row in rows)
        encoded = buffer.getvalue().encode()
        with self._explained():
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
        names = [self._path.name, *(f"{self._path.name}.{number}" for number in range(1, KEPT_FILES + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if self._path.with_name(newer).exists():
                self._path.with_name(newer).replace(self._path.with_name(older))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentFault(f"cannot log to '{self._path}': {error.strerror}") from error
        except UnsafePathError as error:
            raise EnvironmentFault(f"cannot log to '{self._path}': {error}", hint="name another file") from error


class SampleLog(RowLog):
    def __init__(self, path: Path) -> None:
        super().__init__(path, COLUMNS)

    def write(self, sample: Sample) -> None:
        host = sample.snapshot.host
        blank = {**dict.fromkeys(COLUMNS), "taken_at": iso_time(sample.snapshot.taken_at)}
        of_host = {
            "kind": "host",
            "id": "host",
            "name": host.name,
            "memory_total_mb": host.memory_total_mb,
            "memory_used_mb": host.memory_used_mb,
            "memory_free_mb": host.memory_available_mb,
            "utilization_percent": host.cpu_percent,
            "utilization_smoothed_percent": _rounded(sample.cpu_percent),
            "load_1m": host.load_1m,
        }
        rows = [blank | of_host]
        for device in sample.snapshot.devices:
            raw = device_as_dict(device)
            of_device = {
                "kind": "device",
                "utilization_smoothed_percent": _rounded(sample.loads.get(device.id)),
                "power_smoothed_w": _rounded(sample.powers_w.get(device.id)),
                "process_count": None if device.processes is None else len(device.processes),
            }
            rows.append(blank | {column: raw[column] for column in COLUMNS if column in raw} | of_device)
        self.write_rows(rows)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
