"""How much disk space a run of a batch takes, and whether the runs that are left fit on the disk.

The size is the mean of finished runs of the same command: of those in the output root, else of the batch that a new one
begins beside.

Propose limits for a batch by a log of samples, of `gpuyard watch --log` or of a batch's `--sample-log`.

With these limits a run starts only while the machine is no busier than in 95% of the samples: one in twenty is left
out, so that a short spike in a long log raises no limit. Of several GPUs, the busiest one decides.
"""

import contextlib
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, ValidationError, convert

from gpuyard.config import load_config
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.units import MB, format_count, format_size, parse_size
from gpuyard.probes.disk_watch import read_disk_in_time
from gpuyard.recipes.batch.plan import RUNS, SUCCEEDED, BatchPlan, RunRecord, read_record, run_folder
from gpuyard.system.folder_tree import FolderTree
from gpuyard.system.private_files import PrivateFileError, read_own

# Enough for a mean; a batch may have 100,000 runs, and a run as many files.
_MOST_RUNS, _MOST_FILES = 20, 20_000


class RunSize(Struct, frozen=True, kw_only=True):
    """The mean size of a run, over this many runs."""

    mb: float
    runs: int


def expected_run_size(plan: BatchPlan) -> RunSize | None:
    """Return the size that a run of this batch is expected to have; None: unknown."""
    for root in dict.fromkeys((plan.root, re.sub(r"-\d+$", "", plan.root))):
        with contextlib.suppress(EnvironmentFault):
            record = read_record(Path(root))
            if record is not None and record.plan.command == plan.command:
                size = _mean_size(record.plan, _finished(record.plan))
                if size is not None:
                    return size
    return None


def disk_warning(plan: BatchPlan) -> str | None:
    """Return a warning if the runs that are left would fill the disk of the output root; None if they fit, or if the
    size of a run or the free space is unknown."""
    size = expected_run_size(plan)
    figure = read_disk_in_time(plan.root)
    if size is None or size.mb <= 0 or figure.free_mb is None:
        return None
    least_mb = _least_mb(plan)
    left = plan.count - sum(1 for _ in _finished(plan))
    fitting = max(0, int((figure.free_mb - least_mb) / size.mb))
    if left <= fitting:
        return None
    return (
        f"the disk of {plan.root} is too small for this batch: {format_count(left, 'run')} of about"
        f" {format_size(size.mb)} (the mean of {format_count(size.runs, 'run')}) need {format_size(left * size.mb)},"
        f" and {format_size(figure.free_mb)} are free. It starts all the same; after about"
        f" {format_count(fitting, 'run')} the next ones wait until {format_size(least_mb)} are free"
    )


def _least_mb(plan: BatchPlan) -> float:
    own = plan.options.get("min-free-disk")
    return load_config().host.min_free_disk_mb if own is None else parse_size(str(own))


def _mean_size(plan: BatchPlan, runs: Iterable[RunRecord]) -> RunSize | None:
    roots = {plan.root, plan.pruned_root} - {None}  # recorded for a run whose folder has a name of the program
    succeeded = (run for run in runs if run.state == SUCCEEDED and run.kept_in not in roots)
    folders = [run.kept_in or str(run_folder(plan, run.index)) for run in succeeded]
    sizes = [size for folder in folders[-_MOST_RUNS:] if (size := _size_mb(folder)) is not None]
    return RunSize(mb=sum(sizes) / len(sizes), runs=len(sizes)) if sizes else None


def _size_mb(folder: str) -> float | None:
    """Return the size of a folder; None if it does not exist or has very many files."""
    total = files = 0
    try:
        with FolderTree(folder, follows=True) as run:
            for entry in run.walk(lambda _: None):  # what cannot be read, or is mounted there, does not count
                if not entry.is_folder:
                    total, files = total + entry.status.st_size, files + 1
                if files > _MOST_FILES:
                    return None
    except OSError:
        return None
    return total / MB


def _finished(plan: BatchPlan) -> Iterator[RunRecord]:
    """Yield the runs in this root that have succeeded, as far as the batch was summed up."""
    with contextlib.suppress(OSError, PrivateFileError, ValueError, msgspec.MsgspecError):
        for line in read_own(str(Path(plan.root) / RUNS)).decode().splitlines():
            run = msgspec.convert(json.loads(line), RunRecord)
            if run.state == SUCCEEDED:
                yield run


_SHARE = 0.95
_HINT = "give a file that `gpuyard watch --log FILE` has written"


class _Figure(Struct, frozen=True):
    """What an option limits, and the figure's column in the log of `gpuyard watch` and in that of a batch: the one that
    the gate judges. `kind` is that of the row. `sign`: -1 for a limit from below."""

    option: str
    kind: str
    what: str
    unit: str
    column: str
    batch_column: str
    sign: int = 1


_SMOOTHED = "utilization_smoothed_percent"
_FIGURES = (
    _Figure("--max-cpu", "host", "smoothed CPU use", "%", _SMOOTHED, "cpu_smoothed_percent"),
    _Figure("--min-free-mem-mb", "host", "available RAM", " MB", "memory_free_mb", "memory_available_mb", -1),
    _Figure("--max-gpu", "device", "smoothed use", "%", _SMOOTHED, "gpu_smoothed_percent"),
    _Figure("--max-gpu-mem-mb", "device", "memory in use", " MB", "memory_used_mb", "gpu_memory_used_mb"),
)


class ProposedLimit(Struct, frozen=True, kw_only=True):
    """`value` is None if the log does not have the figure."""

    option: str
    value: int | None
    why: str


def read_sample_log(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
        if lines and lines[0].startswith("{"):
            return convert(list(map(json.loads, lines)), list[dict[str, Any]])
        return list(csv.DictReader(lines))
    except OSError as error:
        raise EnvironmentFault(f"cannot read '{path}': {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise UserError(f"'{path}' is not a log of samples: {error}", hint=_HINT) from error


def propose_limits(rows: Iterable[Mapping[str, Any]]) -> list[ProposedLimit]:
    values: dict[str, dict[str, list[float]]] = {figure.option: defaultdict(list) for figure in _FIGURES}
    for row in rows:
        for figure, device, value in _figures_of(row):
            values[figure.option][device].append(value)
    if not any(values.values()):
        raise UserError("the log has no samples of CPU, RAM or GPUs", hint=_HINT)
    return [_propose(figure, values[figure.option]) for figure in _FIGURES]


def _figures_of(row: Mapping[str, Any]) -> Iterator[tuple[_Figure, str, float]]:
    """Yield each known figure of a row with the id of its device, which is empty for the host."""
    is_of_batch = "event" in row  # a row of a batch has figures of the host and of a device
    for figure in _FIGURES:
        text = row.get(figure.batch_column if is_of_batch else figure.column)
        if text not in (None, "") and (is_of_batch or row.get("kind") == figure.kind):
            device = "" if figure.kind == "host" else str(row.get("device") or row.get("id"))
            try:
                yield figure, device, convert(text, float, strict=False)
            except ValidationError as error:
                raise UserError(f"the log has '{text}' for a number", hint=_HINT) from error


def _propose(figure: _Figure, values: Mapping[str, list[float]]) -> ProposedLimit:
    if not values:
        return ProposedLimit(option=figure.option, value=None, why=f"no {figure.option}: its figure is not in the log")
    bounds = {device: _bound([figure.sign * each for each in found]) for device, found in values.items()}
    device = max(bounds, key=lambda each: bounds[each])
    bound = figure.sign * bounds[device]
    where = f" of GPU {device}" + (", the highest" if len(values) > 1 else "") if device else ""
    why = (
        f"{figure.what}{where}: {bound:.1f}{figure.unit} or {'less' if figure.sign > 0 else 'more'}"
        f" in {_SHARE:.0%} of {format_count(len(values[device]), 'sample')}"
    )
    return ProposedLimit(
        option=figure.option, value=math.ceil(bound) if figure.sign > 0 else math.floor(bound), why=why
    )


def _bound(values: list[float]) -> float:
    """Return the smallest value that 95% of the values do not exceed."""
    return sorted(values)[math.ceil(_SHARE * len(values)) - 1]
