"""If pruning is killed at any point, the run is complete at one place, and the next call finishes the move."""

import itertools
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.batch.prune_empty_runs import read_record
from tests.unit.ledger import child
from tests.unit.recipes import RUN, Roots, make_run, prune_and_die, tree_of, write


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: the kernel keeps the writes of a killed process, and there are hundreds of them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_truncated_line_affects_no_other_line(roots: Roots) -> None:
    whole = '{"at": "then", "run": "run-000003", "to": "/x", "why": "no frame"}\n'
    roots.record.write_text(f'{whole}[1]\n{{"run": 5}}\n\n{{"at": "now", "run": "{RUN}", "to": "/som')
    assert list(read_record(roots.record)) == ["run-000003"]
    moved = roots.prune()
    assert {name: line.to for name, line in read_record(roots.record).items()} == {"run-000003": "/x", RUN: moved.to}


def test_an_unreadable_record_is_reported(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none") == {}
    with pytest.raises(EnvironmentFault, match=f"cannot read the record {tmp_path}: .* is not a regular file"):
        read_record(tmp_path)


def all_else(roots: Roots) -> dict[str, Any]:
    """Return everything in the roots except the run and the record."""
    both = {root: tree_of(root) for root in (roots.output, roots.pruned)}
    return {
        f"{root.name}/{path}": entry
        for root, shown in both.items()
        for path, entry in shown.items()
        if path not in (".", roots.record.name) and root / path != roots.run and roots.run not in (root / path).parents
    }


def set_up(roots: Roots) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run and everything else; a run of the same name was pruned before."""
    roots.fill()
    write(roots.run / "log.txt", b"an earlier try")
    roots.prune()
    make_run(roots.run)
    return tree_of(roots.run), all_else(roots)


def check_nothing_is_lost(roots: Roots, before: dict[str, Any]) -> None:
    """Check that the run is complete at its old place or at the place in the record, without another call."""
    if not roots.run.exists() or tree_of(roots.run) != before:
        assert tree_of(Path(read_record(roots.record)[RUN].to or "")) == before


def check_finished(roots: Roots, before: dict[str, Any], others: dict[str, Any]) -> None:
    moved = roots.prune()
    target = roots.pruned / f"{RUN}.2"
    assert (moved.to, moved.left) == (str(target), None)
    assert read_record(roots.record) == {RUN: moved}
    assert tree_of(target) == before
    assert not roots.run.exists()
    shutil.rmtree(target)
    assert all_else(roots) == others


def test_after_a_kill_at_any_point_the_next_call_leaves_the_run_complete_at_one_place(
    roots: Roots,
) -> None:
    with child(prune_and_die) as pruning:
        for point in itertools.count(1):
            before, others = set_up(roots)
            pruning.send((point, roots))
            status = pruning.receive()
            check_nothing_is_lost(roots, before)
            check_finished(roots, before, others)
            if status == 0:
                break
            assert status == -signal.SIGKILL
    assert point > 5


def test_after_repeated_kills_the_run_is_complete_at_one_place(roots: Roots) -> None:
    dice = random.Random(17)
    with child(prune_and_die) as pruning:
        for _ in range(15):
            before, others = set_up(roots)
            for _ in range(dice.randint(2, 5)):
                pruning.send((dice.randint(1, 10), roots))
                assert pruning.receive() in (0, -signal.SIGKILL)
                check_nothing_is_lost(roots, before)
            check_finished(roots, before, others)
