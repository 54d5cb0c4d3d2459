"""Free space on disks: which disks a job writes to, and why it does not start while one of them is nearly full.

- A disk that does not answer is a reason to wait: a program that writes to it would hang.
- A folder whose disk cannot be read for another reason does not keep a job from starting: the start says what is wrong.
"""

from collections.abc import Iterator

from msgspec import Struct

from gpuyard.core.job.job_spec import DiskLimits, JobSpec
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.units import format_size

CONFIGURED = "min_free_disk under [host] in the configuration"


class DiskFigure(Struct, frozen=True, kw_only=True):
    """The disk of a folder. Space that only root may use does not count as free; None: unknown. `silent_s`: for how
    long it has not answered."""

    folder: str
    free_mb: float | None = None
    total_mb: float | None = None
    silent_s: float | None = None


def disk_reason(figure: DiskFigure | None, least_mb: float, what: str, remedy: str) -> Reason | None:
    """Return why nothing that writes to this disk may start now; None if it may. Without a `figure`, the disk is being
    read. `what` names the disk, such as "the disk of the queue"."""
    if least_mb <= 0:
        return None
    if figure is None:
        return Reason(ReasonKind.DISK_FULL, f"the free space of {what} is being read")
    where = f"{what} ({figure.folder})"
    if figure.silent_s is not None:
        text = f"{where} has not answered for {figure.silent_s:.0f} s"
        return Reason(ReasonKind.DISK_FULL, text, needed=least_mb)
    if figure.free_mb is None or figure.free_mb >= least_mb:
        return None
    text = f"{where} has {format_size(figure.free_mb)} free < {format_size(least_mb)}"
    return Reason(
        ReasonKind.DISK_FULL,
        text,
        had=figure.free_mb,
        needed=least_mb,
        remedy=f"free some space; {remedy} is the limit",
    )


def writes_files(spec: JobSpec) -> bool:
    """Return whether disks other than those of the queue matter to the job, or a limit of its own."""
    return not spec.engine and (spec.output is not None or spec.error is not None or spec.disk != DiskLimits())


def output_folders(spec: JobSpec) -> Iterator[str]:
    """Yield the folders that the job writes to, as far as they are known: the part of a pattern before its first
    placeholder."""
    patterns = dict.fromkeys(pattern for pattern in (spec.output, spec.error) if pattern is not None)
    folders = [_known_folder(spec.cwd, pattern) for pattern in patterns]
    yield from dict.fromkeys([*folders, *(() if spec.disk.output_root is None else (spec.disk.output_root,))])


def _known_folder(cwd: str, pattern: str) -> str:
    path = pattern if pattern.startswith("/") else f"{cwd}/{pattern}"
    known: list[str] = []
    for name in path.split("/")[:-1]:
        if "%" in name or "{" in name:
            break
        known.append(name)
    return "/".join(known) or "/"
