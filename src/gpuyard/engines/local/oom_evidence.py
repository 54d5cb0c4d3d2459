"""What is left to see of an attempt that failed: the end of its log, and the kernel's count of killed processes.

Nothing here fails: what cannot be read is no evidence, an empty text or `None`.
"""

from collections.abc import Iterator
from pathlib import Path

from gpuyard.core.job.job import Outcome, OutcomeKind
from gpuyard.core.memory.out_of_memory import Shortage, killed_by_kernel, recognise
from gpuyard.engines.local.job_logs import Kept

_ROOT = Path("/")
_MOST_BYTES = 1 << 16


def shortage_of(outcome: Outcome, log: str | None, kills_before: int | None) -> Shortage | None:
    """What an attempt lacked that failed for want of memory: in its own words, or by the kernel's count."""
    if outcome.kind is not OutcomeKind.FAILED or log is None:
        return None
    told = recognise(read_tail(Path(log)))
    if told is not None or kills_before is None:
        return told
    return killed_by_kernel(outcome.status, kills_before, oom_kills(), None, None)


def read_tail(log: Path, most_bytes: int = _MOST_BYTES) -> str:
    """The last bytes of what is kept of a log, also where it has just been cut."""
    try:
        with Kept(log) as kept:
            end = kept.end
            return b"".join(kept.read_all(max(kept.first, end - most_bytes), end)).decode(errors="replace")
    except OSError:
        return ""


def oom_kills(pid: int | None = None, root: Path = _ROOT) -> int | None:
    """How many processes of that one's cgroup (ours, if none is named) the kernel has killed for want of memory.

    It counts every such kill, whether the group or the whole machine was full. Two counts can be compared when both are
    of the same process: another daemon's group is another count.
    """
    for path in _event_files(root, "self" if pid is None else str(pid)):
        count = _count(path)
        if count is not None:
            return count
    return None


def machine_oom_kills(root: Path = _ROOT) -> int | None:
    """How many processes of the whole machine, other people's too; for where no cgroup counts."""
    return _count(root / "proc/vmstat")


def loaded_libraries(pid: int, root: Path = _ROOT) -> str:
    """The shared libraries that a living process has loaded, a path to a line: they tell which framework it uses."""
    lines = _read(root / "proc" / str(pid) / "maps").splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line and ".so" in line}
    return "\n".join(sorted(paths))


def _event_files(root: Path, process: str) -> Iterator[Path]:
    """The nearest first. A container sees its group as the mount itself, under a path that only its host knows.

    In version 2 a group counts for those below it as well; in version 1 only the group itself and the mount will do.
    """
    top = root / "sys/fs/cgroup"
    groups = _groups(root, process)
    if "" in groups:
        for mount in (top, top / "unified"):
            yield from (folder / "memory.events" for folder in reversed(_lineage(mount, groups[""])))
    if "memory" in groups:
        lineage = _lineage(top / "memory", groups["memory"])
        yield from (folder / "memory.oom_control" for folder in (lineage[-1], lineage[0]))


def _groups(root: Path, process: str) -> dict[str, str]:
    """The process's group by controller; that of version 2 has no name."""
    found: dict[str, str] = {}
    for line in _read(root / "proc" / process / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _lineage(mount: Path, path: str) -> list[Path]:
    folders = [mount]
    for part in path.split("/"):
        if part == "..":
            break
        if part:
            folders.append(folders[-1] / part)
    return folders


def _count(path: Path) -> int | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
