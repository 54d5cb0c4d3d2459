"""A batch: many runs of one command, submitted as jobs of the queue. `batch.json` in its root has the plan and the ids
of the jobs, and is written before they are submitted; repeating a submission after a crash adds nothing.

Batches may share a prune root: each claims there as many numbers for the folders of its runs as a batch may ever have,
with a file that only one of them can create. So no two runs have one name."""

import contextlib
import csv
import io
import itertools
import json
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.client.fast_http import NotThere, connect
from gpuyard.client.retrying import RetryingClient
from gpuyard.client.submitted_code import RemovedIfRefused, submission_facts
from gpuyard.config import load_config
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.container import parse_mount
from gpuyard.model.placeholders import fill_in
from gpuyard.model.selection import format_ids
from gpuyard.model.units import MB, format_count, format_size, parse_size
from gpuyard.probes.disk_watch import read_disk_in_time
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, make_roots
from gpuyard.system.file_locks import locked
from gpuyard.system.folder_tree import FolderTree
from gpuyard.system.private_files import PrivateFileError, read_own
from gpuyard.system.user_directories import named_state_directory
from gpuyard.system.write_files import write_whole

RECORD, RUNS, SUMMARY, PRUNED = "batch.json", "runs.jsonl", "summary.json", "pruned.jsonl"
MOST_RUNS = 100_000
SUCCEEDED = "succeeded"
ExistingBatch: TypeAlias = Literal["again", "resume", "append"]
_CLAIM = ".gpuyard-"  # and the first folder that is claimed
_NUMBERED = re.compile(rf"(?:{re.escape(_CLAIM)})?run-(\d{{6,}})")


class BatchPlan(Struct, frozen=True, kw_only=True):
    """What the user asked for. `options` are those of the queue. `prunes` is what moves empty runs into `pruned_root`:
    "program" or "scheduler". `prune_keeps` is where a program that prunes keeps data: "here", in the run's folder, or
    "there", in `pruned_root`; None to detect it. `frames` is the glob of data files: a run without one is empty.
    `first_number` is in the name of the folder of run 0."""

    name: str
    command: tuple[str, ...]
    count: int
    root: str
    seed: int = 0
    pruned_root: str | None = None
    prunes: str | None = None
    prune_keeps: str | None = None
    frames: str = ANY_FILE
    first_number: int = 0
    options: dict[str, Any] = {}


class BatchPart(Struct, frozen=True, kw_only=True):
    """Runs that were submitted together, `indexes` such as 0-399: `first` and `last` of their jobs, and the `finish`
    job."""

    token: str
    indexes: str
    first: int | None = None
    last: int | None = None
    finish: int | None = None

    @property
    def ids(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class BatchRecord(Struct, frozen=True, kw_only=True):
    plan: BatchPlan
    parts: tuple[BatchPart, ...] = ()


class RunRecord(Struct, frozen=True, kw_only=True):
    """A run as the queue describes it and as a line of `runs.jsonl`; `finish` adds the last three fields."""

    id: int
    index: int
    seed: int
    state: str
    attempts: int
    submitted_at: str
    is_finished: bool = True
    is_live: bool = False
    outcome: str | None = None
    status: int | None = None
    reason: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    seconds: float | None = None
    log: str | None = None
    devices: tuple[str, ...] = ()
    frames: int | None = None
    kept_in: str | None = None
    pruned_to: str | None = None


def run_command(plan: BatchPlan, index: int) -> tuple[str, ...]:
    return fill_in(plan.command, _values(plan, index))


def run_folder(plan: BatchPlan, index: int) -> Path:
    return Path(plan.root) / f"run-{plan.first_number + index:06d}"


def _claim(plan: BatchPlan) -> Path:
    """The file that claims the numbers of the runs in the prune root."""
    return Path(plan.pruned_root or "") / f"{_CLAIM}{run_folder(plan, 0).name}"


def default_root(name: str) -> str:
    """Return a new root in the home: results are not moved to a local disk, because only the home is backed up."""
    return str(Path(named_state_directory()) / "batches" / f"{name}-{secrets.token_hex(4)}")


def _check_program(program: str) -> None:
    """A bare name is looked up only on PATH: another user may have put a file of that name into a shared folder."""
    if shutil.which(program) is not None:
        return
    is_bare = bool(program) and "/" not in program
    if is_bare and os.path.isfile(program):
        mode = "" if os.access(program, os.X_OK) else f"`chmod +x {program}`, and "
        hint = f"{mode}write it as ./{program}; for datagen: --program ./{program}"
        raise UserError(f"there is no program '{program}' on PATH, but there is one in the current folder", hint=hint)
    what = f"'{program}' is not executable" if os.path.exists(program) else f"there is no program '{program}'"
    raise UserError(what, hint="give a program on PATH, or its whole path; for datagen: --program")


class BatchChoice(Struct, frozen=True, kw_only=True):
    """The batch to start. `before`: the record of one that is continued; `first`: its first new run; `note`: for the
    user."""

    plan: BatchPlan
    first: int = 0
    before: BatchRecord | None = None
    note: str | None = None


def start_batch(plan: BatchPlan, mode: ExistingBatch) -> tuple[BatchChoice, BatchRecord]:
    """Choose a batch and submit its runs; choose again if another command has changed the batch meanwhile."""
    while True:
        choice = choose_batch(plan, mode)
        record = _submit_batch(choice.plan, choice.before)
        if record is not None:
            return choice, record


def choose_batch(plan: BatchPlan, mode: ExistingBatch) -> BatchChoice:
    """Choose a batch by its files. Creates and submits nothing."""
    if not plan.frames:
        raise UserError("--frames names no files", hint="give it a pattern such as '*.png'")
    if mode == "again":
        choice = _choose_same_or_new(plan)
    elif mode == "append":
        choice = _choose_append(plan)
    else:
        choice = BatchChoice(plan=plan, before=read_record(Path(plan.root)))
        if choice.before is None:
            hint = "leave out --resume to start one, or name the folder of a batch with --output-root"
            raise UserError(f"there is no batch in {plan.root}", hint=hint)
    plan, note = choice.plan, choice.note
    if plan.count > MOST_RUNS:
        raise UserError(f"{plan.count:,} runs are too many for one batch", hint=f"at most {MOST_RUNS:,}")
    if choice.before is not None:
        return replace(choice, plan=replace(plan, first_number=choice.before.plan.first_number))
    try:
        names = os.listdir(plan.pruned_root) if plan.pruned_root is not None else []
    except OSError:  # it is made later, or refused
        names = []
    used = [int(match[1]) // MOST_RUNS for name in names if (match := _NUMBERED.match(name))]
    number = MOST_RUNS * (max(used, default=-1) + 1)
    if number:
        shared = f"{plan.pruned_root} has runs of another batch, so those of this one are numbered from {number}"
        note = f"{note}; {shared}" if note else shared
    return replace(choice, plan=replace(plan, first_number=number), note=note)


def _choose_same_or_new(plan: BatchPlan) -> BatchChoice:
    reason, candidate = None, plan
    for number in itertools.count(2):
        record = read_record(Path(candidate.root))
        if record is None:
            break
        changed = _changed_field(record.plan, candidate)
        is_finished = _is_finished(record)
        if changed is None and not is_finished:
            return BatchChoice(plan=candidate, before=record, note=f"the batch in {candidate.root} is unfinished")
        if reason is None:
            why = f"was started with another {changed}" if changed else "is finished (--append adds runs to it)"
            reason = f"the batch in {plan.root} {why}"
        root, pruned = f"{plan.root}-{number}", plan.pruned_root
        if pruned is not None:
            pruned = f"{root}-pruned" if pruned == f"{plan.root}-pruned" else f"{pruned}-{number}"
        candidate = replace(plan, root=root, pruned_root=pruned)
    return BatchChoice(plan=candidate, note=reason and f"{reason}; starting a new one in {candidate.root}")


def _choose_append(plan: BatchPlan) -> BatchChoice:
    record = read_record(Path(plan.root))
    if record is None:
        return BatchChoice(plan=plan)
    if not _is_finished(record):
        note = f"the batch in {plan.root} is unfinished, so nothing is added"
        return BatchChoice(plan=plan, before=record, note=note)
    first, count = record.plan.count, record.plan.count + plan.count
    note = f"adds seeds {plan.seed + first} to {plan.seed + count - 1} to the batch in {plan.root}"
    return BatchChoice(plan=replace(plan, count=count), first=first, before=record, note=note)


def _is_finished(record: BatchRecord) -> bool:
    try:
        summary = msgspec.json.decode(read_own(f"{record.plan.root}/{SUMMARY}"), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, PrivateFileError):
        return False
    return summary.get("succeeded") == summary.get("runs") == record.plan.count


def _submit_batch(plan: BatchPlan, before: BatchRecord | None) -> BatchRecord | None:
    """Create the roots, and submit all runs that have not succeeded. Return None, and submit nothing, if another
    command has changed the record in the root, or taken the numbers of the runs."""
    _check_program(run_command(plan, 0)[0])
    pruned = None if plan.pruned_root is None else Path(plan.pruned_root)
    make_roots(Path(plan.root), pruned, is_mover=plan.prunes == "scheduler")
    with locked(Path(plan.root)):
        if read_record(Path(plan.root)) != before:
            return None
        if pruned is not None:
            try:
                _claim(plan).touch(exist_ok=False)
            except FileExistsError:
                if before is None:
                    return None
            except OSError as error:
                raise EnvironmentFault(f"cannot write to the prune root {pruned}: {error.strerror}") from error
        return _submit_rest(BatchRecord(plan=plan) if before is None else _continue(before, plan))


def _changed_field(before: BatchPlan, plan: BatchPlan) -> str | None:
    """Return the field that makes `plan` another batch than `before`, or None."""
    return next((name for name in ("command", "seed", "prunes") if getattr(before, name) != getattr(plan, name)), None)


def _continue(record: BatchRecord, plan: BatchPlan) -> BatchRecord:
    """Return the record with the new plan. A lower count than before removes no runs."""
    before = record.plan
    changed = _changed_field(before, plan)
    if changed is not None:
        values = getattr(before, changed), getattr(plan, changed)
        old, new = (" ".join(value) if isinstance(value, tuple) else str(value) for value in values)
        hint = "continue it with the same, or name another root"
        raise UserError(f"the batch in {plan.root} was started with another {changed}: {old}, not {new}", hint=hint)
    return replace(record, plan=replace(plan, name=before.name, count=max(before.count, plan.count)))


def _submit_rest(record: BatchRecord) -> BatchRecord:
    """Continue the last part if it is unfinished, else submit a new part with all runs that have not succeeded."""
    if record.parts:
        part = record.parts[-1]
        status = None if part.first is None else read_part_status(part)
        if part.first is None or (status is not None and not status["done"]):
            planned = max(index for each in record.parts for index in _indexes(each.indexes)) + 1
            if record.plan.count > planned:
                raise UserError(
                    f"cannot add runs: the {planned:,} runs of the batch in {record.plan.root} have not finished yet",
                    hint=f"follow them with --count {planned}, and raise it when they have finished",
                )
            return _submit_part(record, part)
    done = {index for index, run in read_results(record).items() if run.state == SUCCEEDED}
    left = [index for index in range(record.plan.count) if index not in done]
    if not left:
        return record if read_part_status(record.parts[-1]) is None else _submit_part(record, record.parts[-1])
    part = BatchPart(token=secrets.token_hex(16), indexes=format_ids(left))
    return _submit_part(_write_parts(record, *record.parts, part), part)


def _submit_part(record: BatchRecord, part: BatchPart) -> BatchRecord:
    """Submit the runs and the finish job. Each step can be repeated: the daemon ignores a token that it knows."""
    plan = record.plan
    if part.first is None:
        fixed = {"tag": plan.name, "name": plan.name, "on-reboot": "requeue", "output-root": plan.root}
        options = {**plan.options, **fixed}
        mounts = list(plan.options.get("mount", ()))
        if "image" in options and all(parse_mount(text, os.getcwd()).target != plan.root for text in mounts):
            options["mount"] = [plan.root, *mounts]  # runs in containers write to the root
        table = io.StringIO()
        writer = csv.DictWriter(table, list(_values(plan, 0)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_values(plan, index) for index in _indexes(part.indexes))
        try:
            answer = _post(part.token, plan.command, options, table=table.getvalue())
        except UserError:
            # So that the user can correct the mistake and use the same root.
            _write_parts(record, *record.parts[:-1])
            raise
        part = replace(part, first=answer["first"], last=answer["last"])
        record = _write_parts(record, *record.parts[:-1], part)
    token = f"{part.token}-finish"
    if part.finish is not None:
        job = _get(f"/jobs/{part.finish}")
        if job is not None and job["state"] not in (SUCCEEDED, "failed", "cancelled", "rejected"):
            return record
        token = f"{part.token}-{secrets.token_hex(4)}"  # it failed, or the user has run some jobs again since
    command = (sys.executable, "-P", "-m", "gpuyard.recipes.batch.finish", plan.root)
    own = {"gpus": 0, "after-any": part.ids, "retries": 3, "name": f"{plan.name}-finish"}
    part = replace(part, finish=_post(token, command, {**own, "on-reboot": "requeue"})["first"])
    return _write_parts(record, *record.parts[:-1], part)


def _get(path: str, query: dict[str, str] | None = None) -> dict[str, Any] | None:
    """Return the queue's answer; None if it does not have what is asked for, or no longer."""
    try:
        with RetryingClient() as queue:
            return queue.get(path, query)
    except NotThere:
        return None


def _write_parts(record: BatchRecord, *parts: BatchPart) -> BatchRecord:
    """Write and return the record with these parts. Without any part, the file and the claim are removed."""
    record, path = replace(record, parts=parts), Path(record.plan.root) / RECORD
    if parts:
        write_whole(path, msgspec.json.format(msgspec.json.encode(record)))
    else:
        path.unlink(missing_ok=True)
        if record.plan.pruned_root is not None:
            _claim(record.plan).unlink(missing_ok=True)
    return record


def _post(token: str, command: Sequence[str], options: dict[str, Any], table: str | None = None) -> dict[str, Any]:
    # The runs have a snapshot if the configuration says so. The finish job runs no code of the user.
    facts = submission_facts(command, os.getcwd(), wants_snapshot=False if table is None else None)
    body = {**facts, "token": token, "table": table, "options": options}
    with RemovedIfRefused(body["code"]), connect(start=True) as client:
        answer: dict[str, Any] = client.request("POST", "/submissions", body=body, is_repeatable=True)
    return answer


def _values(plan: BatchPlan, index: int) -> dict[str, str]:
    values = {"index": str(index), "seed": str(plan.seed + index), "output": str(run_folder(plan, index))}
    return values if plan.pruned_root is None else {**values, "prune_root": plan.pruned_root}


def _indexes(text: str) -> Iterator[int]:
    for word in text.split():
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def read_part_status(part: BatchPart) -> dict[str, Any] | None:
    """Return the queue's status of a part; None if it has deleted these jobs, or if their ids are other jobs now."""
    status = _get(f"/batches/{part.first}")
    return status if status is not None and status["token"] == part.token else None


def read_results(record: BatchRecord) -> dict[int, RunRecord]:
    """Return the finished runs by index: those in `runs.jsonl`, replaced by those that the queue still has."""
    results: dict[int, RunRecord] = {}
    with contextlib.suppress(FileNotFoundError):
        results = {run.index: run for run in recorded_runs(record.plan.root)}
    attempts = Counter[int]()
    for part in record.parts:
        after = None if part.first is None or read_part_status(part) is None else 0
        while after is not None and (page := _get(f"/batches/{part.first}/runs", {"after": str(after)})) is not None:
            # Not strict: index and seed are values of the command, and come as text.
            for run in msgspec.convert(page["runs"], list[RunRecord], strict=False):
                attempts[run.index] += run.attempts
                if run.is_finished:
                    results[run.index] = replace(run, attempts=attempts[run.index])
            after = page["next"]
    return results


def recorded_runs(root: str) -> Iterator[RunRecord]:
    for line in read_own(f"{root}/{RUNS}").decode().splitlines():
        yield msgspec.convert(json.loads(line), RunRecord)


def read_record(root: Path) -> BatchRecord | None:
    path = root / RECORD
    try:
        return msgspec.json.decode(read_own(str(path)), type=BatchRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, PrivateFileError) as error:
        raise EnvironmentFault(f"cannot read {path}: {error}", hint="name another output root") from error


def expected_run_size(plan: BatchPlan) -> tuple[float, int] | None:
    """Return the mean size in MB of the last finished runs of the same command, and how many they are: of those in the
    output root, else of the batch that a new one begins beside. None: no run is known."""
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
