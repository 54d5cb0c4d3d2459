"""Whenever the mover is killed, the run is whole at one place, and the next call brings it to its end."""

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
from tests.unit.leases import Child, child
from tests.unit.recipes import RUN, Roots, Way, copying, make_run, prune_and_die, seen, write


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps what a killed process wrote; and there are hundreds of them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_line_that_was_cut_off_spoils_neither_the_next_nor_the_others(roots: Roots) -> None:
    whole = '{"at": "then", "run": "run-000003", "to": "/x", "why": "no frame"}\n'
    roots.record.write_text(f'{whole}[1]\n{{"run": 5}}\n\n{{"at": "now", "run": "{RUN}", "to": "/som')
    assert list(read_record(roots.record)) == ["run-000003"]
    moved = roots.prune()
    assert {name: line.to for name, line in read_record(roots.record).items()} == {"run-000003": "/x", RUN: moved.to}


def test_a_record_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none") == {}
    with pytest.raises(EnvironmentFault, match=f"cannot read the record {tmp_path}: Is a directory"):
        read_record(tmp_path)


@copying
def test_a_run_that_is_one_with_its_target_is_never_removed(roots: Roots) -> None:
    before = seen(roots.run)
    moved = roots.prune()
    shutil.copytree(moved.to or "", roots.run, symlinks=True)
    shutil.rmtree(roots.pruned)
    roots.pruned.symlink_to(roots.output)
    assert seen(Path(roots.prune().to or "")) == before


def die_while_copying(pruning: Child, way: Way, roots: Roots) -> str:
    """The name of what was copied until then."""
    before = set(os.listdir(roots.pruned))
    for point in itertools.count(1):
        pruning.tell((way, point, roots))
        assert pruning.hear() == -signal.SIGKILL
        partial = {name for name in set(os.listdir(roots.pruned)) - before if ".partial-" in name}
        if partial:
            return partial.pop()
    pytest.fail("nothing is copied")


@copying
def test_only_partial_copies_of_this_very_run_are_cleared_away(roots: Roots, way: Way, tmp_path: Path) -> None:
    elsewhere = Roots(output=tmp_path / "out-of-another", pruned=roots.pruned)
    make_run(elsewhere.run)
    with child(prune_and_die) as pruning:
        theirs = die_while_copying(pruning, way, elsewhere)
        die_while_copying(pruning, way, roots)
    roots.prune()
    assert sorted(os.listdir(roots.pruned)) == [theirs, "run-000016", RUN]
    elsewhere.prune()
    assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN, f"{RUN}.2"]


def all_else(roots: Roots) -> dict[str, Any]:
    """Whatever is in the roots but the run and the record."""
    both = {root: seen(root) for root in (roots.output, roots.pruned)}
    return {
        f"{root.name}/{path}": what
        for root, shown in both.items()
        for path, what in shown.items()
        if path not in (".", roots.record.name) and root / path != roots.run and roots.run not in (root / path).parents
    }


def begin_story(roots: Roots) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run as it is, and everything else; one of its name was pruned before."""
    roots.fill()
    write(roots.run / "log.txt", b"an earlier try")
    roots.prune()
    make_run(roots.run)
    return seen(roots.run), all_else(roots)


def check_nothing_is_lost(roots: Roots, before: dict[str, Any]) -> None:
    """Without any further call: the run is whole where it was, or where the record says."""
    if not roots.run.exists() or seen(roots.run) != before:
        assert seen(Path(read_record(roots.record)[RUN].to or "")) == before


def check_good_end(roots: Roots, before: dict[str, Any], others: dict[str, Any]) -> None:
    moved = roots.prune()
    target = roots.pruned / f"{RUN}.2"
    assert (moved.to, moved.left) == (str(target), None)
    assert read_record(roots.record) == {RUN: moved}
    assert seen(target) == before
    assert not roots.run.exists()
    shutil.rmtree(target)
    assert all_else(roots) == others


def test_killed_at_any_point_and_called_again_a_run_is_whole_at_one_place(roots: Roots, way: Way) -> None:
    with child(prune_and_die) as pruning:
        for point in itertools.count(1):
            before, others = begin_story(roots)
            pruning.tell((way, point, roots))
            status = pruning.hear()
            check_nothing_is_lost(roots, before)
            check_good_end(roots, before, others)
            if status == 0:
                break
            assert status == -signal.SIGKILL
    assert point > (5 if way == "renamed" else 40)


def test_killed_time_and_again_a_run_is_whole_at_one_place(roots: Roots, way: Way) -> None:
    dice = random.Random(17)
    with child(prune_and_die) as pruning:
        for _ in range(15):
            before, others = begin_story(roots)
            for _ in range(dice.randint(2, 5)):
                pruning.tell((way, dice.randint(1, 10 if way == "renamed" else 70), roots))
                assert pruning.hear() in (0, -signal.SIGKILL)
                check_nothing_is_lost(roots, before)
            check_good_end(roots, before, others)
