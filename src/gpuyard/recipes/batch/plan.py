"""A batch: many runs of one command, each started when the machine has room for it, left to the queue.

What belongs to a batch lies in its root: `batch.json` says what was asked for and which jobs of the queue do it, and is
written before they are submitted; `run-000017` is run 17's own folder; `runs.jsonl`, `summary.json` and `pruned.jsonl`
are written when all is over (`finish`). A submission carries a token, so one that is sent again after a crash counts
once; a batch that is gone on with starts only what has not succeeded. `batch_root` says which batch a command means.
"""

import contextlib
import csv
import io
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.connect import paths
from gpuyard.connect.fast_http import NotThere, connect
from gpuyard.connect.retrying import RetryingClient
from gpuyard.core.job.job import fill_in
from gpuyard.core.job.selection import format_ids
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, make_roots
from gpuyard.system.atomic_files import locked, write_whole

RECORD, RUNS, SUMMARY, PRUNED = "batch.json", "runs.jsonl", "summary.json", "pruned.jsonl"
MOST_RUNS = 100_000
SUCCEEDED = "succeeded"
_ENDS = (SUCCEEDED, "failed", "cancelled", "rejected")
_PAGE = 1000


class BatchPlan(Struct, frozen=True, kw_only=True):
    """What was asked for. `options` are the queue's. `prunes` says who moves empty runs into `pruned_root`: the program
    or the scheduler. `prune_keeps` says where a program that prunes keeps data: here, in the run's folder, or there, in
    `pruned_root`; None where that is found out. `frames` is a glob of the files that make a run one that is not empty.
    """

    name: str
    command: tuple[str, ...]
    count: int
    root: str
    seed: int = 0
    pruned_root: str | None = None
    prunes: str | None = None
    prune_keeps: str | None = None
    frames: str = ANY_FILE
    options: dict[str, Any] = {}


class BatchPart(Struct, frozen=True, kw_only=True):
    """Runs that were submitted together: `indexes` such as 0-399. `first` and `last` are their jobs', once known, and
    `finish` is the job that comes after them all."""

    token: str
    indexes: str
    first: int | None = None
    last: int | None = None
    finish: int | None = None


class BatchRecord(Struct, frozen=True, kw_only=True):
    plan: BatchPlan
    parts: tuple[BatchPart, ...] = ()


def words_of(plan: BatchPlan, index: int) -> tuple[str, ...]:
    """The command of a run, as it will be started."""
    return fill_in(plan.command, _values(plan, index))


def run_folder(plan: BatchPlan, index: int) -> Path:
    return Path(plan.root) / f"run-{index:06d}"


def default_root(name: str) -> str:
    """For a batch whose output nobody asked to be kept together."""
    return str(Path(paths.state_folder()) / "batches" / f"{name}-{secrets.token_hex(4)}")


def check_words(plan: BatchPlan) -> None:
    if plan.count > MOST_RUNS:
        raise UserError(f"{plan.count:,} runs are too many for one batch", hint=f"at most {MOST_RUNS:,}")
    if not plan.frames:
        raise UserError("--frames names no files", hint="give it a pattern such as '*.png'")


def check(plan: BatchPlan) -> None:
    """Whatever can be wrong is told before the first launch."""
    check_words(plan)
    _check_program(words_of(plan, 0)[0])
    make_roots(Path(plan.root), None if plan.pruned_root is None else Path(plan.pruned_root))


def _check_program(program: str) -> None:
    """A bare name is looked up on PATH alone, as a shell does: in a shared folder, anybody may have put a file of that
    name."""
    if shutil.which(program) is not None:
        return
    is_bare = bool(program) and "/" not in program
    if is_bare and os.path.isfile(program):
        mode = "" if os.access(program, os.X_OK) else f"`chmod +x {program}`, and "
        raise UserError(
            f"there is no program '{program}' on PATH; there is one in the current folder",
            hint=f"{mode}write it as ./{program}; datagen takes it as --program ./{program}",
        )
    what = f"'{program}' cannot be executed" if os.path.exists(program) else f"there is no program '{program}'"
    raise UserError(what, hint="name one that is on PATH, or its whole path; datagen takes it as --program")


def begin(plan: BatchPlan, before: BatchRecord | None) -> BatchRecord | None:
    """Submit what has not succeeded yet. None where the root's record is no longer the one that was read before."""
    check(plan)
    with locked(Path(plan.root)):
        if read_record(Path(plan.root)) != before:
            return None
        return _submit_rest(BatchRecord(plan=plan) if before is None else _continued(before, plan))


def changed_field(before: BatchPlan, plan: BatchPlan) -> str | None:
    """What makes it another batch, or None."""
    return next((name for name in ("command", "seed", "prunes") if getattr(before, name) != getattr(plan, name)), None)


def _continued(record: BatchRecord, plan: BatchPlan) -> BatchRecord:
    """With no fewer runs than before: a lower count takes none away."""
    before = record.plan
    changed = changed_field(before, plan)
    if changed is not None:
        was, asked = (_told(getattr(each, changed)) for each in (before, plan))
        raise UserError(
            f"the batch in {plan.root} was begun with another {changed}: {was}, not {asked}",
            hint="go on with the same, or name another root",
        )
    return replace(record, plan=replace(plan, name=before.name, count=max(before.count, plan.count)))


def _told(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _submit_rest(record: BatchRecord) -> BatchRecord:
    """Goes on with the last part where that is not over; else with a new one for all that has not succeeded."""
    if record.parts:
        part = record.parts[-1]
        if part.first is None or not _is_over(part):
            _refuse_more(record)
            return _submit_part(record, part)
    done = {index for index, run in results(record).items() if run["state"] == SUCCEEDED}
    left = [index for index in range(record.plan.count) if index not in done]
    if not left:
        return record if standing_of(record.parts[-1]) is None else _submit_part(record, record.parts[-1])
    part = BatchPart(token=secrets.token_hex(16), indexes=format_ids(left))
    record = replace(record, parts=(*record.parts, part))
    _write_record(record)
    return _submit_part(record, part)


def _refuse_more(record: BatchRecord) -> None:
    planned = max(index for part in record.parts for index in _indexes(part.indexes)) + 1
    if record.plan.count > planned:
        raise UserError(
            f"the {planned:,} runs of the batch in {record.plan.root} are not over yet, so there cannot be more",
            hint=f"follow them with --count {planned}, and raise it when they are done",
        )


def _submit_part(record: BatchRecord, part: BatchPart) -> BatchRecord:
    """Each step can be done again: a token that the daemon knows adds nothing."""
    plan = record.plan
    if part.first is None:
        options = {**plan.options, "tag": plan.name, "name": plan.name, "on-reboot": "requeue"}
        try:
            answer = _post(part.token, plan.command, options, table=_table(plan, _indexes(part.indexes)))
        except UserError:
            _take_back(record)
            raise
        part = replace(part, first=answer["first"], last=answer["last"])
        record = _with_part(record, part)
    if part.finish is None:
        return _submit_finish(record, part, f"{part.token}-finish")
    if _has_ended(part.finish):  # somebody had runs done again since, or it could not do all it should
        return _submit_finish(record, part, f"{part.token}-{secrets.token_hex(4)}")
    return record


def _has_ended(job_id: int) -> bool:
    try:
        with RetryingClient() as queue:
            return queue.get(f"/jobs/{job_id}")["state"] in _ENDS
    except NotThere:
        return True


def _submit_finish(record: BatchRecord, part: BatchPart, token: str) -> BatchRecord:
    plan = record.plan
    command = (sys.executable, "-P", "-m", "gpuyard.recipes.batch.finish", plan.root)
    options = {
        "gpus": 0,
        "after-any": f"{part.first}-{part.last}",
        "retries": 3,
        "name": f"{plan.name}-finish",
        "on-reboot": "requeue",
    }
    return _with_part(record, replace(part, finish=_post(token, command, options)["first"]))


def _take_back(record: BatchRecord) -> None:
    """What the queue has refused was never begun: the same root can be used again once the mistake is mended."""
    record = replace(record, parts=record.parts[:-1])
    if record.parts:
        _write_record(record)
    else:
        (Path(record.plan.root) / RECORD).unlink(missing_ok=True)


def _with_part(record: BatchRecord, part: BatchPart) -> BatchRecord:
    record = replace(record, parts=(*record.parts[:-1], part))
    _write_record(record)
    return record


def _post(token: str, command: Sequence[str], options: dict[str, Any], table: str | None = None) -> dict[str, Any]:
    body = {
        "token": token,
        "command": list(command),
        "table": table,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "options": options,
    }
    with connect(start=True) as client:
        answer: dict[str, Any] = client.request("POST", "/submissions", body=body, is_repeatable=True)
    return answer


def _table(plan: BatchPlan, indexes: Iterable[int]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_values(plan, 0)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_values(plan, index) for index in indexes)
    return text.getvalue()


def _values(plan: BatchPlan, index: int) -> dict[str, str]:
    values = {"index": str(index), "seed": str(plan.seed + index), "output": str(run_folder(plan, index))}
    return values if plan.pruned_root is None else {**values, "prune_root": plan.pruned_root}


def _indexes(text: str) -> Iterator[int]:
    for word in text.split():
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _is_over(part: BatchPart) -> bool:
    """Whether nothing of it is left to be done, so far as the queue knows it."""
    standing = standing_of(part)
    return standing is None or bool(standing["done"])


# What is known of the runs


def standing_of(part: BatchPart) -> dict[str, Any] | None:
    """As the queue tells it; `None` where it has forgotten these jobs, or has others of the same numbers."""
    try:
        with RetryingClient() as queue:
            standing = queue.get(f"/batches/{part.first}")
    except NotThere:
        return None
    return standing if standing["token"] == part.token else None


def results(record: BatchRecord) -> dict[int, dict[str, Any]]:
    """What became of each run, by index: as it was written down, and as the queue knows better."""
    found = {run["index"]: run for run in _read_lines(Path(record.plan.root) / RUNS)}
    attempts: dict[int, int] = {}
    for part in record.parts:
        for run in _runs_of(part) if part.first is not None and standing_of(part) is not None else ():
            index = run["index"]
            attempts[index] = attempts.get(index, 0) + run["attempts"]
            if run["is_finished"]:
                found[index] = {**run, "attempts": attempts[index]}
    return found


def _runs_of(part: BatchPart) -> Iterator[dict[str, Any]]:
    after: int | None = 0
    with RetryingClient() as queue:
        while after is not None:
            page = queue.get(f"/batches/{part.first}/runs", {"after": str(after), "limit": str(_PAGE)})
            for run in page["runs"]:
                yield {**run, "index": int(run["index"]), "seed": int(run["seed"])}
            after = page["next"]


# Files


def read_record(root: Path) -> BatchRecord | None:
    path = root / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}", hint="name another output root") from error


def _write_record(record: BatchRecord) -> None:
    write_whole(Path(record.plan.root) / RECORD, msgspec.json.format(msgspec.json.encode(record)))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
