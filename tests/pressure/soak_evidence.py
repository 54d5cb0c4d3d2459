"""What the programs of a soak wrote down, as the checks need it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tests.pressure.outside import GPU_NAME, RAM_NAME
from tests.pressure.threshold_checks import ForeignUse, ProgramRun
from tests.torture.evidence import read_runs


def read_soak(
    lines: Iterable[str], disks: Mapping[str, float], output_disk: tuple[str, float]
) -> tuple[list[ProgramRun], list[ForeignUse]]:
    """Return the programs that leased something by their starts, and the use of GPUs without a lease. `disks` are the
    limits of all jobs, `output_disk` is that of jobs with an output file."""
    kept = list(lines)
    ticks: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for what, run, pid, at, *more in (line.split() for line in kept):
        if what == "tick":
            ticks[run, pid].append((float(at), float(more[0])))
    programs: list[ProgramRun] = []
    foreign: list[ForeignUse] = []
    for each in read_runs(kept):
        held = ticks[each.run, str(each.pid)]
        if each.run.startswith(GPU_NAME):
            if held:  # it takes its GPU memory before its first tick
                end = each.last if each.status is not None else held[-1][0]
                foreign += [
                    ForeignUse(device=device, mb=each.mb or 0.0, start=held[0][0], end=end) for device in each.devices
                ]
            continue
        if each.run.startswith(RAM_NAME):
            continue
        name, ram, cpus = each.name.split(":")[:3]
        own = dict([output_disk]) if name.startswith("output") else {}
        programs.append(
            ProgramRun(
                run=f"{each.run} {name}",
                start=each.start,
                last=each.last,
                is_job=each.attempt is not None,
                ram_mb=float(ram),
                vram_mb=each.mb or 0.0,
                cpus=float(cpus),
                devices=each.devices,
                disks={**disks, **own} if each.attempt is not None else {},
                held=tuple(held),
            )
        )
    return programs, foreign
