"""Read and write traces: when jobs arrive, how long each runs alone, and what it takes of a device.

The format is CSV with a header. The first five columns are required; defaults are in brackets:

    at_s          when it is submitted, in seconds from the start
    program       the command; jobs with the same command are one program to the estimates
    duration_s    how long it runs alone on a device
    peak_mb       the most memory that it holds on each of its devices
    load_percent  how busy it keeps a device, alone
    gpus          the number of devices [1]
    declared_mb   the memory that its user declares [none]
    start_s       it imports for this many seconds before it uses a device at all [0]
    ramp_s        then its memory grows in equal steps over this many seconds [0]
    late_s        when it requests the last part of its memory, in seconds from its start [never]
    late_mb       the size of that part [0]
    priority      [0]
    urgent        1 if it may preempt others [0]
    kind          the measured configuration whose slow-down it has, or `foreign` for a process outside the queue
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from msgspec import Struct, convert, structs

from gpuyard.errors import EnvironmentFault, UserError

FOREIGN = "foreign"
_RAMP_STEPS = 8


class TraceJob(Struct, frozen=True, kw_only=True):
    """One row of a trace; the fields are explained at the top of the module."""

    at_s: float
    program: str
    duration_s: float
    peak_mb: float
    load_percent: float
    gpus: int = 1
    declared_mb: float | None = None
    start_s: float = 0.0
    ramp_s: float = 0.0
    late_s: float | None = None
    late_mb: float = 0.0
    priority: int = 0
    urgent: int = 0
    kind: str = ""

    @property
    def is_foreign(self) -> bool:
        return self.kind == FOREIGN


class Phase(Struct, frozen=True):
    """The memory that a job holds on each device from `from_s` seconds of its work on."""

    from_s: float
    memory_mb: float


COLUMNS = tuple(field.name for field in structs.fields(TraceJob))
_REQUIRED = COLUMNS[:5]
_WHOLE = frozenset({"gpus", "priority", "urgent"})
_TEXT = frozenset({"program", "kind"})


def phases_of(job: TraceJob) -> tuple[Phase, ...]:
    """Return the memory of a job as steps: none while it imports, the ramp, then the late part."""
    early_mb = job.peak_mb - job.late_mb
    steps = _RAMP_STEPS if job.ramp_s > 0 else 1
    ramp = [Phase(job.start_s + job.ramp_s * step / steps, early_mb * (step + 1) / steps) for step in range(steps)]
    if job.start_s:
        ramp.insert(0, Phase(0.0, 0.0))
    if job.late_s is None or not job.late_mb:
        return tuple(ramp)
    return (*(phase for phase in ramp if phase.from_s < job.late_s), Phase(job.late_s, job.peak_mb))


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a trace by arrival. Raises UserError with the line that cannot be read."""
    with open_text(path) as file:
        jobs = list(parse_trace(file, path.name))
    if not jobs:
        raise UserError(f"{path.name} has no jobs", hint="write a line for each job below the header")
    return sorted(jobs, key=lambda job: job.at_s)


def parse_trace(lines: Iterable[str], name: str) -> Iterator[TraceJob]:
    rows = csv.reader(lines, strict=True)
    try:
        header = [column.strip() for column in next(rows, [])]
        _check_header(header, name)
        for row in filter(None, rows):
            if len(row) != len(header):
                raise UserError(f"{name}, line {rows.line_num}: {len(row)} values for {len(header)} columns")
            yield _job(dict(zip(header, map(str.strip, row), strict=True)), f"{name}, line {rows.line_num}")
    except csv.Error as error:
        raise UserError(f"{name}, line {rows.line_num}: {error}") from error


def write_trace(jobs: Sequence[TraceJob], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in jobs:
        writer.writerow("" if value is None else value for value in structs.astuple(job))


def open_text(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}") from error


def table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file. Raises UserError if a column is missing."""
    with open_text(path) as file:
        try:
            rows = csv.DictReader(file, strict=True)
            if missing := [column for column in columns if column not in (rows.fieldnames or ())]:
                raise UserError(f"{path.name} lacks the columns {', '.join(missing)}")
            return list(rows)
        except csv.Error as error:
            raise UserError(f"{path.name}: {error}") from error


def number(row: Mapping[str, str], column: str) -> float:
    """Return the number in a column of a row. Raises UserError if it is not a number."""
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise UserError(f"{column} is '{row[column]}', not a number, in: {', '.join(map(str, row.values()))}") from None


def _check_header(header: Sequence[str], name: str) -> None:
    if unknown := [column for column in header if column not in COLUMNS]:
        raise UserError(f"{name} has unknown columns: {', '.join(unknown)}", hint=f"known: {', '.join(COLUMNS)}")
    if missing := [column for column in _REQUIRED if column not in header]:
        raise UserError(f"{name} lacks the columns {', '.join(missing)}", hint=f"required: {','.join(_REQUIRED)}")
    if len(set(header)) < len(header):
        raise UserError(f"{name} has a column twice")


def _job(row: Mapping[str, str], where: str) -> TraceJob:
    values = {column: _value(column, text, where) for column, text in row.items() if text or column in _REQUIRED}
    job = convert(values, TraceJob)
    is_late_in_time = job.late_s is None or job.late_s < job.duration_s
    rules = {
        "duration_s must be more than 0": job.duration_s > 0,
        "load_percent must be from 0 to 100": 0 <= job.load_percent <= 100,
        "gpus must be at least 1": job.gpus >= 1,
        "late_mb must be at most peak_mb, and late_s before the end": job.late_mb <= job.peak_mb and is_late_in_time,
        "late_s and late_mb go together": bool(job.late_mb) == (job.late_s is not None),
        "start_s and ramp_s are longer than duration_s": job.start_s + job.ramp_s <= job.duration_s,
    }
    for message, holds in rules.items():
        if not holds:
            raise UserError(f"{where}: {message}")
    return job


def _value(column: str, text: str, where: str) -> str | int | float:
    if column in _TEXT:
        if column == "program" and not text:
            raise UserError(f"{where}: program is empty")
        return text
    try:
        value = int(text) if column in _WHOLE else float(text)
    except ValueError:
        raise UserError(f"{where}: {column} is '{text}', not a number") from None
    if not math.isfinite(value) or (value < 0 and column != "priority"):
        raise UserError(f"{where}: {column} is {text}, but must be a finite number of 0 or more")
    return value
