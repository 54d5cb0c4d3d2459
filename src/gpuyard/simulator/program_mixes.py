"""Draw random traces from measured programs; the same seed gives the same trace.

Measured are the memory and load of a program (and for `carma` its duration; its loads are those of a similar program of
`lucid`, see `_SIMILAR`). The rest is drawn: memory within 3% of the measured value; none for the first 2 to 15 seconds,
in which it imports, then growth for 5 to 30 seconds; in one run of twenty the last 10% to 30% come late; durations
log-normal around 15 minutes, from 1 minute to 4 hours; declared memory up to half too much, in whole GB; arrivals as a
Poisson process."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.simulator.traces import CONFIGURATION, SINGLE_FILE, TraceJob, configuration, number, open_text, table

CARMA_FILE, PODS_FILE = "carma-summary.csv", "alibaba-openb_pod_list_default.csv"
_MEDIAN_S, _DEVIATION = 900.0, 1.0  # of durations; the deviation is that of the logarithm
# A pattern in the name of a program, and the similar configuration; `{}` is the batch size.
_SIMILAR = (
    (r"resnet(18|34).*cifar", "ResNet18/CIFAR-10/{}"),
    (r"mobilenet.*cifar", "MobileNetV2/CIFAR-10/{}"),
    (r"cifar", "EfficientNet/CIFAR-10/{}"),
    (r"mobilenet|efficientnet", "MobileNetV3/ImageNet/{}"),
    (r"bert|xlnet|gpt2", "BERT/SQuAD/32"),
    (r"unet", "DCGAN/LSUN/64"),
    (r"dlrm", "NeuMF/MovieLens/128"),
    (r"", "ResNet50/ImageNet/{}"),
)


class MeasuredProgram(Struct, frozen=True, kw_only=True):
    """Measurements of one program, alone on a device."""

    command: str
    memory_mb: float
    load_percent: float
    kind: str
    duration_s: float | None = None


def read_lucid(folder: Path) -> list[MeasuredProgram]:
    return [
        MeasuredProgram(
            command=f"python {model}.py --dataset {dataset} --batch {batch}{' --amp' if amp == '1' else ''}",
            memory_mb=number(row, "gmem"),
            load_percent=number(row, "gpu_util"),
            kind=configuration(model, dataset, batch, amp),
        )
        for row in table(folder / SINGLE_FILE, (*CONFIGURATION, "gpu_util", "gmem"))
        for model, dataset, batch, amp in [tuple(row[column] for column in CONFIGURATION)]
    ]


def read_carma(folder: Path) -> list[MeasuredProgram]:
    loads = {program.kind: program.load_percent for program in read_lucid(folder)}
    programs = []
    for row in table(folder / CARMA_FILE, ("Model", "Max memory.used [MB]", "Run folder", "Execution time(s)")):
        model = row["Model"].rsplit("_workloads_", 1)[-1]
        found = re.search(r"--batch_size_(\d+)", row["Run folder"])
        kind = similar_configuration(model, found[1] if found else "")
        program = MeasuredProgram(
            command=f"python {model}.py" + (f" --batch {found[1]}" if found else ""),
            memory_mb=number(row, "Max memory.used [MB]"),
            load_percent=loads.get(kind, 100.0),
            kind=kind,
            duration_s=number(row, "Execution time(s)"),
        )
        programs.append(program)
    return programs


def similar_configuration(model: str, batch: str) -> str:
    """Return the measured configuration whose load a program without a measured load gets."""
    kind = next(kind for pattern, kind in _SIMILAR if re.search(pattern, model.lower()))
    return kind.format(batch or "64")


MIXES = {"lucid": read_lucid, "carma": read_carma}


def read_programs(names: Sequence[str], folder: Path) -> list[MeasuredProgram]:
    """Return all programs of these mixes."""
    if unknown := [name for name in names if name not in MIXES]:
        raise UserError(f"there is no mix '{unknown[0]}'", hint=f"there are: {', '.join(MIXES)}")
    return [program for name in names for program in MIXES[name](folder)]


def draw(programs: Sequence[MeasuredProgram], count: int, seed: int, per_hour: float) -> list[TraceJob]:
    """Return `count` jobs that arrive at the given mean rate."""
    random, starts = Random(seed), Random(f"start {seed}")  # noqa: S311 - chance, not secrecy
    jobs, at_s = [], 0.0
    for _ in range(count):
        job = _run_of(random.choice(programs), at_s, random)
        jobs.append(replace(job, start_s=round(min(starts.uniform(2.0, 15.0), job.duration_s / 10), 3)))
        at_s += random.expovariate(per_hour / 3600.0)
    return jobs


def mean_duration_s(programs: Sequence[MeasuredProgram]) -> float:
    usual_s = _MEDIAN_S * math.exp(_DEVIATION**2 / 2)
    return sum(program.duration_s or usual_s for program in programs) / len(programs)


def _run_of(program: MeasuredProgram, at_s: float, random: Random) -> TraceJob:
    drawn_s = min(14_400.0, max(60.0, random.lognormvariate(math.log(_MEDIAN_S), _DEVIATION)))
    duration_s = program.duration_s or drawn_s
    peak_mb = program.memory_mb * random.uniform(0.97, 1.03)
    is_late, late, when = random.randrange(20) == 0, random.uniform(0.1, 0.3), random.uniform(0.2, 0.8)
    return TraceJob(
        at_s=round(at_s, 3), program=program.command, duration_s=round(duration_s, 3), peak_mb=round(peak_mb, 1),
        load_percent=program.load_percent, declared_mb=1024.0 * math.ceil(peak_mb * random.uniform(1.0, 1.5) / 1024.0),
        ramp_s=round(min(random.uniform(5.0, 30.0), duration_s / 10), 3),
        late_s=round(duration_s * when, 3) if is_late else None, late_mb=round(peak_mb * late, 1) if is_late else 0.0,
        kind=program.kind,
    )  # fmt: skip


def is_pod_list(path: Path) -> bool:
    """Return whether the header is that of a list of pods."""
    with open_text(path) as file:
        try:
            return "gpu_milli" in file.readline().split(",")
        except UnicodeDecodeError:
            return False  # reading the file raises the error


def read_pods(path: Path, card_mb: float) -> tuple[list[TraceJob], int]:
    """Return the pods that ran on GPUs, and the number of the others. A pod with a share of a card's time gets the same
    share of its memory. Its wait in the original cluster is ignored."""
    columns = ("name", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time", "scheduled_time")
    rows = table(path, columns)
    ran = [row for row in rows if row["num_gpu"] != "0" and row["scheduled_time"] and _ran_s(row) > 0]
    first = min((number(row, "creation_time") for row in ran), default=0.0)
    jobs = [
        TraceJob(
            at_s=number(row, "creation_time") - first,
            program=f"pod.sh --qos {row['qos']} --gpus {row['num_gpu']} --milli {row['gpu_milli']}",
            duration_s=_ran_s(row),
            peak_mb=share * card_mb,
            load_percent=100.0 * share,
            gpus=int(number(row, "num_gpu")),
            declared_mb=share * card_mb,
        )
        for row in ran
        for share in [number(row, "gpu_milli") / 1000.0]
    ]
    return sorted(jobs, key=lambda job: job.at_s), len(rows) - len(ran)


def _ran_s(row: dict[str, str]) -> float:
    return number(row, "deletion_time") - number(row, "scheduled_time")
