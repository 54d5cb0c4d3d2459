"""What the jobs, scripts and programs of a torture run wrote down themselves, and how it is read.

Lines of the evidence: `start RUN PID TIME DEVICES MB NAME`, `tick RUN PID TIME LINE`, `miss RUN PID TIME LINE ERRNO`,
`printed RUN PID TIME LINES`, `end RUN PID TIME STATUS`. RUN is JOB.ATTEMPT for jobs, and a name for others. TIME is the
monotonic clock of the machine.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct


class Run(Struct, kw_only=True):
    """One process that ran: when it certainly lived, on which devices, and what it printed.

    `mb` is None for whole devices. `last` is the last proof of life. `status` is None without an end. `printed` is the
    number of the last line that was certainly printed, `missed` are those that could not be.
    """

    run: str
    pid: int
    start: float
    last: float
    devices: tuple[str, ...]
    mb: float | None
    name: str
    printed: int = 0
    missed: set[int] = set()
    status: int | None = None

    @property
    def attempt(self) -> tuple[int, int] | None:
        """The job and the number of the attempt; None if it is not a job of the queue."""
        job, dot, number = self.run.partition(".")
        return (int(job), int(number)) if dot and job.isdigit() and number.isdigit() else None


def read_runs(lines: Iterable[str]) -> list[Run]:
    """Return all runs by the order of their starts. A process is one run."""
    runs: dict[tuple[str, int], Run] = {}
    for what, run, pid, at, *more in (line.split() for line in lines):
        key = (run, int(pid))
        if what == "start":
            devices, mb, name = more
            runs[key] = Run(
                run=run,
                pid=key[1],
                start=float(at),
                last=float(at),
                devices=tuple(device for device in devices.split(",") if device and device != "-1"),
                mb=None if mb == "-" else float(mb),
                name=name,
                missed=set(),
            )
            continue
        _add(runs[key], what, float(at), [int(each) for each in more])
    return sorted(runs.values(), key=lambda each: each.start)


def _add(run: Run, what: str, at: float, numbers: list[int]) -> None:
    run.last = max(run.last, at)
    if what == "end":
        run.status = numbers[0]
    elif what == "miss":
        run.missed.add(numbers[0])
    else:
        run.printed = max(run.printed, numbers[0])


class EvidenceFile:
    """The file that the jobs append to, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        path.chmod(0o666)
        self._at = 0
        self.starts: list[float] = []

    def lines(self) -> Iterator[str]:
        return iter(self.path.read_text(encoding="ascii").splitlines())

    def start_after(self, moment: float) -> float | None:
        """Return when the first attempt of the queue started after this moment, None if none has."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new.rpartition(b"\n")[0]
        self._at += len(whole) + 1 if whole else 0
        for fields in map(bytes.split, whole.split(b"\n")):
            if fields and fields[0] == b"start" and b"." in fields[1]:
                self.starts.append(float(fields[3]))
        return min((at for at in self.starts if at > moment), default=None)
