"""Traces of jobs: the CSV format; how much programs that share a card slow each other, as was measured; and random
traces of measured programs: the same seed gives the same trace.
Measured are the memory and load of a program (and for `carma` its duration; its loads are those of a similar program of
`lucid`, see `_SIMILAR`). The rest is drawn: memory within 3% of the measured value; none for the first 2 to 15 seconds,
in which it imports, then growth for 5 to 30 seconds; in one run of twenty the last 10% to 30% come late; durations
log-normal around 15 minutes, from 1 minute to 4 hours; declared memory up to half too much, in whole GB; arrivals as a
Poisson process."""

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TextIO

from msgspec import Struct, convert, structs
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, UserError

FOREIGN = "foreign"


class TraceJob(Struct, frozen=True, kw_only=True):
    """One row of a trace; `docs/how-to/compare-policies.md` explains the fields."""

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


def phases_of(job: TraceJob) -> tuple[Phase, ...]:
    """Return the memory of a job as steps: none while it imports, the ramp, then the late part."""
    early_mb = job.peak_mb - job.late_mb
    steps = 8 if job.ramp_s > 0 else 1
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
        if unknown := [column for column in header if column not in COLUMNS]:
            raise UserError(f"{name} has unknown columns: {', '.join(unknown)}", hint=f"known: {', '.join(COLUMNS)}")
        if missing := [column for column in _REQUIRED if column not in header]:
            raise UserError(f"{name} lacks the columns {', '.join(missing)}", hint=f"required: {','.join(_REQUIRED)}")
        if len(set(header)) < len(header):
            raise UserError(f"{name} has a column twice")
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
    if column in ("program", "kind"):
        if column == "program" and not text:
            raise UserError(f"{where}: program is empty")
        return text
    try:
        value = int(text) if column in ("gpus", "priority", "urgent") else float(text)
    except ValueError:
        raise UserError(f"{where}: {column} is '{text}', not a number") from None
    if not math.isfinite(value) or (value < 0 and column != "priority"):
        raise UserError(f"{where}: {column} is {text}, but must be a finite number of 0 or more")
    return value


SINGLE_FILE, PAIRS_FILE = "lucid-single_data.csv", "lucid-colocate_info.csv"
CONFIGURATION = ("model", "dataset", "batchsize", "amp")

# A configuration, and its load alone on a device in percent.
Member = tuple[str, float]
Speeds = Mapping[tuple[str, str], float]


def curve(load_percent: float) -> float:
    """Return the speed of two jobs that were not measured together, for the sum of their loads."""
    knee, sharpness = 1.35, 4
    return float((1.0 + (load_percent / 100.0 / knee) ** sharpness) ** (-1.0 / sharpness))


class Sharing:
    """`measured` is the speed of the first configuration beside the second; `loads` are their loads alone."""

    def __init__(self, measured: Speeds | None = None, loads: Mapping[str, float] | None = None) -> None:
        self._measured = measured or {}
        self._demands = fit_demands(loads or {}, self._measured)
        self.speeds: Callable[[tuple[Member, ...]], tuple[float, ...]] = lru_cache(65_536)(self._find_speeds)

    def demand(self, member: Member) -> float:
        """Return the part of a device that a job uses up for each second of its own work."""
        kind, load_percent = member
        return min(self._demands.get(kind, 1.0), load_percent / 100.0)

    def _find_speeds(self, members: tuple[Member, ...]) -> tuple[float, ...]:
        speeds = []
        for position, (kind, load_percent) in enumerate(members):
            others = (*members[:position], *members[position + 1 :])
            pairs = [(self._measured.get((kind, other)), load) for other, load in others]
            product = math.prod(curve(load_percent + load) if found is None else found for found, load in pairs)
            speeds.append(max(product, 1.0 / len(members)))
        total = sum(self.demand(member) * speed for member, speed in zip(members, speeds, strict=True))
        return tuple(speeds) if total <= 1.0 else tuple(speed / total for speed in speeds)


def utilization_percent(loads: Iterable[float]) -> float:
    """Return the load of a device under several jobs, by the formula that fits the measured pairs best."""
    return 100.0 * (1.0 - math.prod(1.0 - load / 100.0 for load in loads))


def fit_demands(loads: Mapping[str, float], measured: Speeds) -> dict[str, float]:
    """Return demands that fit all measured pairs: reduced from the loads until all fit, then raised where possible."""
    most = {**{kind: 1.0 for pair in measured for kind in pair}, **{kind: load / 100.0 for kind, load in loads.items()}}
    demands = dict(most)
    for one, other in sorted(measured):
        total = demands[one] * measured[one, other] + demands[other] * measured[other, one]
        if total > 1.0:
            for kind in {one, other}:
                demands[kind] /= total
    beside: dict[str, list[str]] = {}
    for one, other in measured:
        beside.setdefault(one, []).append(other)
    for kind in sorted(demands):
        limits = [
            1.0 / (2.0 * measured[kind, kind])
            if kind == other
            else (1.0 - demands[other] * measured[other, kind]) / measured[kind, other]
            for other in beside.get(kind, ())
        ]
        demands[kind] = min(1.0, most[kind], *limits)
    return demands


def configuration(model: str, dataset: str, batch: str, amp: str) -> str:
    return f"{model}/{dataset}/{batch}{'/amp' if amp == '1' else ''}"


def read_sharing(folder: Path) -> Sharing:
    """Return the slow-down from the measured pairs in the directory of public traces."""
    singles = table(folder / SINGLE_FILE, (*CONFIGURATION, "gpu_util"))
    loads = {configuration(*(row[column] for column in CONFIGURATION)): number(row, "gpu_util") for row in singles}
    found: dict[tuple[str, str], list[float]] = {}
    sides = [[f"{column}{side}" for column in (*CONFIGURATION, "speed")] for side in (1, 2)]
    for row in table(folder / PAIRS_FILE, [*sides[0], *sides[1]]):
        one, other = (configuration(*(row[column] for column in side[:-1])) for side in sides)
        found.setdefault((one, other), []).append(number(row, "speed1"))
        found.setdefault((other, one), []).append(number(row, "speed2"))
    return Sharing({pair: min(1.0, sum(speeds) / len(speeds)) for pair, speeds in found.items()}, loads)


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
    if unknown := [name for name in names if name not in MIXES]:
        raise UserError(f"there is no mix '{unknown[0]}'", hint=f"there are: {', '.join(MIXES)}")
    return [program for name in names for program in MIXES[name](folder)]


def draw(programs: Sequence[MeasuredProgram], count: int, seed: int, per_hour: float) -> list[TraceJob]:
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
