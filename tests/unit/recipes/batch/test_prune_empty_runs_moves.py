"""Runs are moved, or left in place with a reason."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuyard.recipes.batch.prune_empty_runs import prune, read_record
from tests.unit.recipes import (
    AT,
    RUN,
    WHY,
    Roots,
    make_run,
    tree_of,
    write,
)


def record_lines(roots: Roots) -> list[dict[str, Any]]:
    return [json.loads(line) for line in roots.record.read_text().splitlines()]


def test_the_target_of_a_run_is_on_disk_before_the_move(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    rename = os.rename

    def note(descriptor: int) -> None:
        matching = (
            path for path in (roots.record, roots.output) if os.path.samestat(path.stat(), os.fstat(descriptor))
        )
        synced.extend(matching)

    def move(source: Path, target: Path) -> None:
        assert synced == [roots.record, roots.output]
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", move)
    assert roots.prune().left is None


def test_a_run_is_moved_unchanged_and_recorded(roots: Roots) -> None:
    before, kept, earlier = (
        tree_of(roots.run),
        tree_of(roots.output / "run-000018"),
        tree_of(roots.pruned / "run-000016"),
    )
    moved = roots.prune()
    assert (moved.run, moved.to, moved.why, moved.left) == (RUN, str(roots.pruned / RUN), WHY, None)
    assert tree_of(roots.pruned / RUN) == before
    assert sorted(os.listdir(roots.output)) == ["pruned.jsonl", "run-000018"]
    assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]
    assert (tree_of(roots.output / "run-000018"), tree_of(roots.pruned / "run-000016")) == (kept, earlier)
    assert record_lines(roots)[-1].items() >= {"at": AT, "run": RUN, "to": moved.to, "why": WHY}.items()
    assert read_record(roots.record) == {RUN: moved}
    assert roots.prune() == moved


def test_a_moved_run_has_one_line_in_the_record(roots: Roots) -> None:
    roots.prune()
    assert len(record_lines(roots)) == 1


def test_a_move_never_overwrites_anything(roots: Roots) -> None:
    (roots.pruned / RUN).mkdir()
    (roots.pruned / f"{RUN}.2").write_text("a file")
    (roots.pruned / f"{RUN}.3").symlink_to("nowhere")
    before, others = tree_of(roots.run), {name: tree_of(roots.pruned / name) for name in os.listdir(roots.pruned)}
    assert roots.prune().to == str(roots.pruned / f"{RUN}.4")
    assert tree_of(roots.pruned / f"{RUN}.4") == before
    assert {name: tree_of(roots.pruned / name) for name in others} == others


def test_a_target_name_taken_at_the_last_moment_is_not_used(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    before, mkdir, rename = tree_of(roots.run), os.mkdir, os.rename

    def taken_first(path: Any, mode: int = 0o777, **options: Any) -> None:
        if str(path) == str(roots.pruned / RUN):
            mkdir(path)
        mkdir(path, mode, **options)

    def filled_first(source: Any, target: Any) -> None:
        if str(target) == str(roots.pruned / f"{RUN}.2"):
            (Path(target) / "theirs").mkdir()
        rename(source, target)

    monkeypatch.setattr(os, "mkdir", taken_first)
    if os.getuid() == 0:  # others cannot put anything into a reserved folder
        monkeypatch.setattr(os, "rename", filled_first)
    moved = roots.prune()
    assert moved.to == str(roots.pruned / (f"{RUN}.3" if os.getuid() == 0 else f"{RUN}.2"))
    assert tree_of(Path(moved.to or "")) == before
    assert os.listdir(roots.pruned / RUN) == []


def make_again_with(run: Path, path: str, content: bytes | None) -> None:
    """Create the run again with one difference: a file with other content, or a folder."""
    make_run(run)
    with contextlib.suppress(FileNotFoundError):
        (run / path).unlink()
    if content is None:
        (run / path).mkdir()
    else:
        write(run / path, content)


@pytest.mark.parametrize(
    ("path", "content"), [("log.txt", b"another try"), ("deep/latest", b"no link"), ("0.png", None)]
)
def test_a_new_run_of_the_same_name_is_moved_beside_the_old_run(roots: Roots, path: str, content: bytes | None) -> None:
    first, second = roots.pruned / RUN, roots.pruned / f"{RUN}.2"
    roots.prune()
    before = tree_of(first)
    make_again_with(roots.run, path, content)
    again = tree_of(roots.run)
    assert roots.prune().to == str(second)
    assert (tree_of(first), tree_of(second)) == (before, again)


def test_a_run_identical_to_a_renamed_run_is_moved_beside_it(roots: Roots) -> None:
    roots.prune()
    make_run(roots.run)
    assert roots.prune().to == str(roots.pruned / f"{RUN}.2")
    assert (roots.pruned / RUN / "log.txt").read_bytes() == (roots.pruned / f"{RUN}.2" / "log.txt").read_bytes()


def check_left(roots: Roots, before: dict[str, Any], reason: str) -> None:
    """Check that the run and the prune root are unchanged and the record has the reason."""
    moved = roots.prune()
    assert moved.to is None
    assert reason in (moved.left or "")
    assert tree_of(roots.run) == before
    assert os.listdir(roots.pruned) == ["run-000016"]
    assert read_record(roots.record) == {RUN: moved}


def test_without_its_prune_root_a_run_is_left_and_the_root_not_created(roots: Roots) -> None:
    before = tree_of(roots.run)
    shutil.rmtree(roots.pruned)
    assert roots.prune().left == f"the prune root {roots.pruned} is missing"
    assert tree_of(roots.run) == before
    assert not roots.pruned.exists()
    assert read_record(roots.record)[RUN].left == f"the prune root {roots.pruned} is missing"


def test_a_run_is_left_if_the_record_cannot_be_written(roots: Roots) -> None:
    before, record = tree_of(roots.run), roots.output / "nowhere" / "pruned.jsonl"
    moved = prune(roots.run, roots.pruned, record, why=WHY, at=AT)
    assert moved.left == f"the record cannot be written: No such file or directory ({record})"
    assert tree_of(roots.run) == before
    assert os.listdir(roots.pruned) == ["run-000016"]


def test_a_run_that_is_not_a_folder_is_left(roots: Roots) -> None:
    shutil.rmtree(roots.run)
    roots.run.symlink_to("run-000018")
    assert roots.prune().left == f"Not a directory ({roots.run})"
    assert os.readlink(roots.run) == "run-000018"


def test_a_run_that_cannot_be_renamed_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_busy(source: Any, target: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", is_busy)
    check_left(roots, tree_of(roots.run), "Device or resource busy")


@pytest.mark.linux("file names that are not UTF-8")
def test_names_that_are_not_text_are_moved_and_reported(roots: Roots) -> None:
    odd = os.fsdecode(b"frame-\xff.png")
    (roots.run / odd).touch()
    pruned_run = roots.prune()
    assert read_record(roots.record) == {RUN: pruned_run}
    assert odd in os.listdir(pruned_run.to or "")
