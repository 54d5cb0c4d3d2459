"""Whether the runs of a batch that are left fit on the disk. The size of a run is the mean of finished runs of the same
command: of those in the output root, else of the batch that a new one begins beside.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpuyard.config import load_config
from gpuyard.errors import EnvironmentFault
from gpuyard.model.units import MB, format_count, format_size, parse_size
from gpuyard.probes.disk_watch import read_disk_in_time
from gpuyard.recipes.batch.plan import SUCCEEDED, BatchPlan, RunRecord, read_record, recorded_runs, run_folder
from gpuyard.system.folder_tree import FolderTree
from gpuyard.system.private_files import PrivateFileError


def expected_run_size(plan: BatchPlan) -> tuple[float, int] | None:
    """Return the mean size in MB, and of how many runs; None if no run is known."""
    for root in dict.fromkeys((plan.root, re.sub(r"-\d+$", "", plan.root))):
        with contextlib.suppress(EnvironmentFault):
            record = read_record(Path(root))
            if record is None or record.plan.command != plan.command:
                continue
            done, roots = record.plan, {record.plan.root, record.plan.pruned_root}
            # A root itself is recorded for a run whose folder has a name of the program.
            own = [run for run in _finished(done) if run.kept_in is None or run.kept_in not in roots]
            folders = [run.kept_in or str(run_folder(done, run.index)) for run in own[-20:]]  # enough for a mean
            if sizes := [size for folder in folders if (size := _size_mb(folder)) is not None]:
                return sum(sizes) / len(sizes), len(sizes)
    return None


def disk_warning(plan: BatchPlan) -> str | None:
    """Return a warning if the runs that are left would fill the disk of the output root; None also if that is
    unknown."""
    run_mb, runs = expected_run_size(plan) or (0.0, 0)
    figure = read_disk_in_time(plan.root)
    if run_mb <= 0 or figure.free_mb is None:
        return None
    own = plan.options.get("min-free-disk")
    least_mb = load_config().host.min_free_disk_mb if own is None else parse_size(str(own))
    left = plan.count - sum(1 for _ in _finished(plan))
    fitting = max(0, int((figure.free_mb - least_mb) / run_mb))
    if left <= fitting:
        return None
    return (
        f"the disk of {plan.root} is too small for this batch: {format_count(left, 'run')} of about"
        f" {format_size(run_mb)} (the mean of {format_count(runs, 'run')}) need {format_size(left * run_mb)},"
        f" and {format_size(figure.free_mb)} are free. It starts all the same; after about"
        f" {format_count(fitting, 'run')} the next ones wait until {format_size(least_mb)} are free"
    )


def _size_mb(folder: str) -> float | None:
    """Return the size of a folder; None if it does not exist or has more than 20,000 files."""
    total = files = 0
    try:
        with FolderTree(folder, follows=True) as run:
            for entry in run.walk(lambda _: None):  # what cannot be read, or is mounted there, does not count
                if not entry.is_folder:
                    total, files = total + entry.status.st_size, files + 1
                if files > 20_000:
                    return None
    except OSError:
        return None
    return total / MB


def _finished(plan: BatchPlan) -> Iterator[RunRecord]:
    """Yield the runs in this root that have succeeded, as far as the batch was summed up."""
    with contextlib.suppress(OSError, PrivateFileError, ValueError, msgspec.MsgspecError):
        yield from (run for run in recorded_runs(plan.root) if run.state == SUCCEEDED)
