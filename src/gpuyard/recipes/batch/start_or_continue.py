"""Which batch a command means: one that is begun, one that goes on, or one that is added to.

The same command again goes on with its batch while that is unfinished, which it is until every run has succeeded. After
that it begins a new batch beside the old one: `out-2` beside `out`. A batch of another command is left alone, too.
`--resume` means the batch in exactly that root, `--append` adds runs with the next seeds to it.
"""

import itertools
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.recipes.batch.plan import SUMMARY, BatchPlan, BatchRecord, begin, changed_field, read_record


class ExistingBatch(Enum):
    AGAIN = auto()
    RESUME = auto()
    APPEND = auto()


class BatchChoice(Struct, frozen=True, kw_only=True):
    """What is to be done: `before` is the record of the batch that goes on, `first` the index of the first run that is
    new to it, `note` is what to tell the user."""

    plan: BatchPlan
    first: int = 0
    before: BatchRecord | None = None
    note: str | None = None


class _Tally(Struct, frozen=True, kw_only=True):
    """Of a summary."""

    runs: int
    succeeded: int


def begin_chosen(plan: BatchPlan, way: ExistingBatch) -> tuple[BatchChoice, BatchRecord]:
    """Submits what has not succeeded yet; chooses again where another command was faster."""
    while True:
        choice = choose(plan, way)
        record = begin(choice.plan, choice.before)
        if record is not None:
            return choice, record


def choose(plan: BatchPlan, way: ExistingBatch) -> BatchChoice:
    """Reads files only; makes and submits nothing."""
    if way is ExistingBatch.RESUME:
        return BatchChoice(plan=plan, before=read_record(Path(plan.root)))
    return _choose_append(plan) if way is ExistingBatch.APPEND else _choose_again(plan)


def _choose_again(plan: BatchPlan) -> BatchChoice:
    passed_over: str | None = None
    for candidate in _beside_each_other(plan):
        record = read_record(Path(candidate.root))
        if record is None:
            return BatchChoice(
                plan=candidate, note=passed_over and f"{passed_over}; a new one begins in {candidate.root}"
            )
        changed = changed_field(record.plan, candidate)
        is_finished = _is_finished(record)
        if changed is None and not is_finished:
            return BatchChoice(plan=candidate, before=record, note=f"the batch in {candidate.root} is unfinished")
        if passed_over is None:
            passed_over = f"the batch in {plan.root} " + (
                f"was begun with another {changed}" if changed else "is finished (--append adds runs to it)"
            )
    raise AssertionError("there is always another root")


def _choose_append(plan: BatchPlan) -> BatchChoice:
    record = read_record(Path(plan.root))
    if record is None:
        return BatchChoice(plan=plan)
    if not _is_finished(record):
        return BatchChoice(
            plan=plan, before=record, note=f"the batch in {plan.root} is unfinished, so nothing is added"
        )
    first, count = record.plan.count, record.plan.count + plan.count
    seeds = f"seeds {plan.seed + first} to {plan.seed + count - 1}"
    note = f"adds {seeds} to the batch in {plan.root}"
    return BatchChoice(plan=replace(plan, count=count), first=first, before=record, note=note)


def _beside_each_other(plan: BatchPlan) -> Iterator[BatchPlan]:
    yield plan
    for number in itertools.count(2):
        root, pruned = f"{plan.root}-{number}", plan.pruned_root
        if pruned is not None:
            pruned = f"{root}-pruned" if pruned == f"{plan.root}-pruned" else f"{pruned}-{number}"
        yield replace(plan, root=root, pruned_root=pruned)


def _is_finished(record: BatchRecord) -> bool:
    try:
        tally = msgspec.json.decode((Path(record.plan.root) / SUMMARY).read_bytes(), type=_Tally)
    except (OSError, msgspec.DecodeError):
        return False
    return tally.succeeded == tally.runs == record.plan.count
