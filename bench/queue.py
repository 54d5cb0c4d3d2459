"""Cost of the queue: a job, a hand-over, a submission, a command, a long queue, an idle daemon; and other queues on the
same work.

`python -m bench queue` measures all parts, `python -m bench queue jobs idle` only the named ones: see `PARTS`.
"""

import operator
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from bench.floor import floors
from bench.peers import peers
from bench.private_gpuyard import GPUYARD, PrivateGpuyard, gpuyard_tools, private_gpuyard
from bench.work import Tool, ToolFailed, compile_stamp, do_work, gaps_s, percentile

_ROUNDS = 3
_SLOTS = 2
_COMMANDS = 30
_FIRSTS = 9
_MANY = 100_000
_STEPS = 20
Command = tuple[str, ...]


class Figures(msgspec.Struct):
    """Measurements of one tool so far."""

    tool: Tool
    seconds: list[float] = msgspec.field(default_factory=list)
    gaps: list[float] = msgspec.field(default_factory=list)
    problem: str = ""


def bench_queue(names: Sequence[str]) -> None:
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"unknown part: {', '.join(unknown)}; parts are: {', '.join(PARTS)}")
    failures = []
    for name in names or [name for name in PARTS if name != "peers"]:
        try:
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                PARTS[name](Path(scratch))
        except ToolFailed as failure:
            failures.append(f"queue {name}: {failure}")
        print()
    if failures:
        raise SystemExit("\n".join(failures))


def bench_jobs(folder: Path) -> None:
    _compare(folder, [*floors(), *gpuyard_tools(), *peers()])


def bench_peers(folder: Path) -> None:
    _compare(folder, [*floors(), *peers()])


def _compare(folder: Path, tools: Iterable[Tool]) -> None:
    all_figures = [Figures(tool, problem="" if tool.is_installed() else f"missing: {tool.install}") for tool in tools]
    command = (shutil.which("true") or "true",)
    stamp = compile_stamp(folder)
    # Tools take turns in each round, so that a slow minute of the machine affects all of them. What they wrote stays
    # until all are measured: for 5 minutes after many files were deleted, ext4 takes 0.2 ms to create one, not 14 us.
    for number in range(_ROUNDS):
        for place, figures in enumerate(all_figures):
            _measure(figures, _take_jobs, folder / f"jobs-{number}-{place}", command)
    for place, figures in enumerate(all_figures):
        _measure(figures, _take_gaps, folder / f"gaps-{place}", stamp)
    _print_table(all_figures)


def _measure(figures: Figures, take: Callable[[Figures, Path, Command], None], folder: Path, command: Command) -> None:
    if figures.problem:
        return
    try:
        take(figures, folder, command)
    except ToolFailed as failure:
        figures.problem = str(failure)


def _take_jobs(figures: Figures, folder: Path, command: Command) -> None:
    figures.seconds.append(do_work(figures.tool, folder, command, figures.tool.jobs, _SLOTS))


def _take_gaps(figures: Figures, folder: Path, stamp: Command) -> None:
    stamps = folder / "stamps"
    do_work(figures.tool, folder, (*stamp, str(stamps)), figures.tool.hand_overs, 1)
    figures.gaps = gaps_s(stamps, figures.tool.hand_overs)


def _print_table(all_figures: Sequence[Figures]) -> None:
    print(f"`true` through {_SLOTS} slots, median of {_ROUNDS}; hand-over: from a job's end to the next start, 1 slot")
    print(f"{'':<34}{'jobs':>6}{'jobs/s':>9}{'of floor':>10}{'hand-over':>13}{'90th':>13}")
    floor = all_figures[0].tool.jobs / statistics.median(all_figures[0].seconds)
    for figures in all_figures:
        print(f"{figures.tool.name:<34}{_speed(figures, floor)}{_hand_over(figures)}  {_remark(figures)}".rstrip())


def _speed(figures: Figures, floor: float) -> str:
    if not figures.seconds:
        return " " * 25
    speed = figures.tool.jobs / statistics.median(figures.seconds)
    return f"{figures.tool.jobs:6}{speed:9,.{0 if speed >= 10 else 1}f}{speed / floor:9.1%} "


def _hand_over(figures: Figures) -> str:
    if not figures.gaps:
        return " " * 26
    return f"{statistics.median(figures.gaps) * 1e3:10.2f} ms{percentile(figures.gaps, 90) * 1e3:10.2f} ms"


def _remark(figures: Figures) -> str:
    return figures.problem or figures.tool.note


def bench_array(folder: Path) -> None:
    """Measure a large submission, and the response times of other requests meanwhile."""
    with private_gpuyard(folder / "home", "2x24GB") as gpuyard:
        gpuyard("pause")
        poller = subprocess.Popen(
            [sys.executable, "-m", "bench.poll_status", str(gpuyard.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert poller.stdout is not None
        if not poller.stdout.readline():
            raise ToolFailed("the daemon did not answer GET /status")
        started = time.perf_counter()
        _submit_array(gpuyard)
        taken = time.perf_counter() - started
        count, median, slowest = map(float, poller.communicate()[0].split())
    print(f"{f'submit of an array of {_MANY:,}':<44}{taken:10.2f} s")
    print(f"{'GET /status meanwhile, slowest response':<44}{slowest * 1e3:10.2f} ms", end="")
    print(f"  (median {median * 1e3:.2f} ms of {count:.0f})")


def _submit_array(gpuyard: PrivateGpuyard) -> None:
    gpuyard("submit", "--array", f"0-{_MANY - 1}", "--", "true")


def bench_commands(folder: Path) -> None:
    """Measure whole processes, from exec to exit, compared with an interpreter that does nothing. CPU time depends less
    on other programs of the machine than the time that passes.

    The speed of a machine changes while it is measured, by half on some: ratios are taken within a round, and the order
    of the commands changes from round to round.
    """
    commands = {
        "python -c pass": (sys.executable, "-c", "pass"),
        "gpuyard submit -- true": (GPUYARD, "submit", "--", "true"),
        "gpuyard queue": (GPUYARD, "queue"),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    order = list(commands)
    with private_gpuyard(folder / "home", "2x24GB") as gpuyard:
        gpuyard("pause")
        for _ in range(_COMMANDS):
            for name in order:
                used_s = _children_s()
                seconds = process_s(gpuyard, commands[name])
                taken[name].append((seconds, _children_s() - used_s))
            order = [*order[1:], order[0]]
    floors = list(zip(*taken["python -c pass"], strict=True))
    for name, rows in taken.items():
        figures = list(zip(zip(*rows, strict=True), floors, strict=True))
        seconds, cpu_s = (statistics.median(column) for column, _ in figures)
        ratio, cpu_ratio = (statistics.median(map(operator.truediv, column, floor)) for column, floor in figures)
        cpu = f"{cpu_s * 1e3:10.2f} ms of CPU{cpu_ratio:10.2f} x"
        print(f"{name:<44}{seconds * 1e3:10.2f} ms{ratio:10.2f} x python{cpu}")


def _children_s() -> float:
    """Return the CPU time of all processes that we have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bench_first(folder: Path) -> None:
    """Measure a submission that starts the daemon."""
    seconds = []
    with private_gpuyard(folder / "home", "2x24GB") as gpuyard:
        for _ in range(_FIRSTS):
            gpuyard("daemon", "stop")
            seconds.append(process_s(gpuyard, (GPUYARD, "submit", "--gpus", "0", "--", "true")))
    floor = statistics.median(process_s(gpuyard, (sys.executable, "-c", "pass")) for _ in range(_FIRSTS))
    median = statistics.median(seconds)
    what = "gpuyard submit when no daemon runs yet"
    print(f"{what:<44}{median * 1e3:10.2f} ms{median / floor:10.2f} x python  (fastest {min(seconds) * 1e3:.0f} ms)")


def process_s(gpuyard: PrivateGpuyard, command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, env=gpuyard.env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def bench_waiting(folder: Path) -> None:
    """Compare 1,000 waiting jobs with 1,000,000."""
    with private_gpuyard(folder / "home", "2x24GB") as gpuyard:
        gpuyard("pause")
        gpuyard("submit", "--array", "0-999", "--", "true")
        few = _step_us(gpuyard), _page_s(gpuyard)
        for _ in range(10):
            _submit_array(gpuyard)
        many = _step_us(gpuyard), _page_s(gpuyard)
    print(f"{'':<44}{'1,000':>13}{'1,000,000':>13}{'ratio':>10}")
    print(f"{'a step':<44}{few[0]:10.0f} us{many[0]:10.0f} us{many[0] / few[0]:10.2f}")
    print(f"{'gpuyard queue':<44}{few[1] * 1e3:10.2f} ms{many[1] * 1e3:10.2f} ms{many[1] / few[1]:10.2f}")


def _step_us(gpuyard: PrivateGpuyard) -> float:
    """Return the median duration of a step, as the daemon reports it. A submission causes each step."""
    steps = []
    for _ in range(_STEPS):
        gpuyard("submit", "--", "true")
        steps.append(gpuyard.status()["step_us"])
    return statistics.median(steps)


def _page_s(gpuyard: PrivateGpuyard) -> float:
    return statistics.median(process_s(gpuyard, (GPUYARD, "queue")) for _ in range(_STEPS))


def bench_idle(folder: Path) -> None:
    """Measure a daemon without any jobs."""
    period = float(os.environ.get("GPUYARD_BENCH_IDLE_S", "60"))
    with private_gpuyard(folder / "home", "2x24GB") as gpuyard:
        pid = gpuyard.status()["pid"]
        used = _cpu_s(pid)
        time.sleep(period)
        used = _cpu_s(pid) - used
        resident = resident_bytes(pid)
    print(f"{f'idle daemon over {period:.0f} s':<44}{used / period:10.3%} of a core{resident / 1e6:10.1f} MB")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_s(pid: int) -> float:
    # The program's name is in brackets and may contain any character, so the fields are counted from its end.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PARTS: dict[str, Callable[[Path], None]] = {
    "jobs": bench_jobs,
    "peers": bench_peers,  # the same as `jobs` without gpuyard; only when named
    "array": bench_array,
    "commands": bench_commands,
    "first": bench_first,
    "waiting": bench_waiting,
    "idle": bench_idle,
}
