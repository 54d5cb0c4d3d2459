"""Choose the batch for a command: start a new one, continue an unfinished one, or add runs to a finished one.

The same command continues its batch until every run has succeeded. After that it starts a new batch beside the old one:
`out-2` beside `out`; also if the batch in `out` is of another command. `--resume` continues the batch in exactly that
root; `--append` adds runs with the next seeds to it.
"""

import itertools
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.recipes.batch.plan import (
    SUMMARY,
    BatchPlan,
    BatchRecord,
    changed_field,
    read_record,
    submit_batch,
    unused_number,
)
from gpuyard.system.private_files import PrivateFileError, read_own


class ExistingBatch(Enum):
    AGAIN = auto()
    RESUME = auto()
    APPEND = auto()


class BatchChoice(Struct, frozen=True, kw_only=True):
    """The batch to start: `before` is the record of a batch that is continued, `first` the index of its first new run,
    `note` a message for the user."""

    plan: BatchPlan
    first: int = 0
    before: BatchRecord | None = None
    note: str | None = None


def start_batch(plan: BatchPlan, mode: ExistingBatch) -> tuple[BatchChoice, BatchRecord]:
    """Choose a batch and submit its runs; choose again if another command has changed the batch meanwhile."""
    while True:
        choice = choose_batch(plan, mode)
        record = submit_batch(choice.plan, choice.before)
        if record is not None:
            return choice, record


def choose_batch(plan: BatchPlan, mode: ExistingBatch) -> BatchChoice:
    """Choose a batch by its files. Creates and submits nothing."""
    if mode is ExistingBatch.RESUME:
        choice = BatchChoice(plan=plan, before=read_record(Path(plan.root)))
        if choice.before is None:
            hint = "leave out --resume to start one, or name the folder of a batch with --output-root"
            raise UserError(f"there is no batch in {plan.root}", hint=hint)
    else:
        choice = _choose_append(plan) if mode is ExistingBatch.APPEND else _choose_same_or_new(plan)
    number = unused_number(choice.plan) if choice.before is None else choice.before.plan.first_number
    note = choice.note
    if number and choice.before is None:
        shared = f"{choice.plan.pruned_root} has runs of another batch, so those of this one are numbered from {number}"
        note = f"{note}; {shared}" if note else shared
    return replace(choice, plan=replace(choice.plan, first_number=number), note=note)


def _choose_same_or_new(plan: BatchPlan) -> BatchChoice:
    reason: str | None = None
    for candidate in _numbered_roots(plan):
        record = read_record(Path(candidate.root))
        if record is None:
            return BatchChoice(plan=candidate, note=reason and f"{reason}; starting a new one in {candidate.root}")
        changed = changed_field(record.plan, candidate)
        is_finished = _is_finished(record)
        if changed is None and not is_finished:
            return BatchChoice(plan=candidate, before=record, note=f"the batch in {candidate.root} is unfinished")
        if reason is None:
            reason = f"the batch in {plan.root} " + (
                f"was started with another {changed}" if changed else "is finished (--append adds runs to it)"
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


def _numbered_roots(plan: BatchPlan) -> Iterator[BatchPlan]:
    yield plan
    for number in itertools.count(2):
        root, pruned = f"{plan.root}-{number}", plan.pruned_root
        if pruned is not None:
            pruned = f"{root}-pruned" if pruned == f"{plan.root}-pruned" else f"{pruned}-{number}"
        yield replace(plan, root=root, pruned_root=pruned)


def _is_finished(record: BatchRecord) -> bool:
    try:
        summary = msgspec.json.decode(read_own(f"{record.plan.root}/{SUMMARY}"), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, PrivateFileError):
        return False
    return summary.get("succeeded") == summary.get("runs") == record.plan.count
