"""Runs are moved, by renaming or by copying, or left with the reason."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gpuyard.recipes.batch.prune_empty_runs import prune, read_record
from tests.unit.leases import as_root, child
from tests.unit.recipes import (
    AT,
    NOBODY,
    RUN,
    WHY,
    Roots,
    Way,
    copying,
    make_run,
    mounted,
    rename_within_folders_only,
    renaming,
    seen,
    write,
)


def record_lines(roots: Roots) -> list[dict[str, Any]]:
    return [json.loads(line) for line in roots.record.read_text().splitlines()]


@renaming
def test_where_a_run_goes_is_on_disk_before_it_is_moved(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    rename = os.rename

    def note(descriptor: int) -> None:
        there = (path for path in (roots.record, roots.output) if os.path.samestat(path.stat(), os.fstat(descriptor)))
        synced.extend(there)

    def move(source: Path, target: Path) -> None:
        assert synced == [roots.record, roots.output]
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", move)
    assert roots.prune().left is None


def test_a_run_is_moved_as_it_is_and_recorded(roots: Roots) -> None:
    before, kept, earlier = seen(roots.run), seen(roots.output / "run-000018"), seen(roots.pruned / "run-000016")
    moved = roots.prune()
    assert (moved.run, moved.to, moved.why, moved.left) == (RUN, str(roots.pruned / RUN), WHY, None)
    assert seen(roots.pruned / RUN) == before
    assert sorted(os.listdir(roots.output)) == ["pruned.jsonl", "run-000018"]
    assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]
    assert (seen(roots.output / "run-000018"), seen(roots.pruned / "run-000016")) == (kept, earlier)
    assert record_lines(roots)[-1].items() >= {"at": AT, "run": RUN, "to": moved.to, "why": WHY}.items()
    assert read_record(roots.record) == {RUN: moved}
    assert roots.prune() == moved


def test_a_record_has_one_line_for_a_run_that_was_moved(roots: Roots, way: Way) -> None:
    roots.prune()
    assert len(record_lines(roots)) == (3 if way == "mounted twice" else 1)


def test_nothing_is_moved_over_anything(roots: Roots) -> None:
    (roots.pruned / RUN).mkdir()
    (roots.pruned / f"{RUN}.2").write_text("a file")
    (roots.pruned / f"{RUN}.3").symlink_to("nowhere")
    before, others = seen(roots.run), {name: seen(roots.pruned / name) for name in os.listdir(roots.pruned)}
    assert roots.prune().to == str(roots.pruned / f"{RUN}.4")
    assert seen(roots.pruned / f"{RUN}.4") == before
    assert {name: seen(roots.pruned / name) for name in others} == others


def test_a_name_that_is_taken_in_the_last_moment_is_not_used(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    before, mkdir, rename = seen(roots.run), os.mkdir, os.rename

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
    assert seen(Path(moved.to or "")) == before
    assert os.listdir(roots.pruned / RUN) == []


def make_anew(run: Path, path: str, content: bytes | None) -> None:
    """As it was, but for this: a file with other content, or a folder."""
    make_run(run)
    with contextlib.suppress(FileNotFoundError):
        (run / path).unlink()
    if content is None:
        (run / path).mkdir()
    else:
        write(run / path, content)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("log.txt", b"another try"),
        ("log.txt", b"scene missed\n" * 100),
        ("deep/er/new.txt", b""),
        ("deep/latest", b"no link"),
        ("0.png", None),
        ("deep/er/new", None),
    ],
)
def test_a_new_run_of_the_same_name_is_moved_beside_the_old_one(roots: Roots, path: str, content: bytes | None) -> None:
    first, second = roots.pruned / RUN, roots.pruned / f"{RUN}.2"
    roots.prune()
    before = seen(first)
    make_anew(roots.run, path, content)
    again = seen(roots.run)
    assert roots.prune().to == str(second)
    assert (seen(first), seen(second)) == (before, again)


@renaming
def test_what_is_the_same_to_the_byte_as_a_run_that_was_renamed_goes_beside_it(roots: Roots) -> None:
    roots.prune()
    make_run(roots.run)
    assert roots.prune().to == str(roots.pruned / f"{RUN}.2")
    assert (roots.pruned / RUN / "log.txt").read_bytes() == (roots.pruned / f"{RUN}.2" / "log.txt").read_bytes()


@copying
def test_what_is_the_same_to_the_byte_as_its_copy_is_not_copied_again(roots: Roots) -> None:
    first = roots.prune()
    before = seen(roots.pruned / RUN)
    make_run(roots.run)
    assert roots.prune() == first
    assert not roots.run.exists()
    assert seen(roots.pruned / RUN) == before
    assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]


def check_left(roots: Roots, before: dict[str, Any], told: str) -> None:
    """The run is where it was, the prune root as it was, and the record says so."""
    moved = roots.prune()
    assert moved.to is None
    assert told in (moved.left or "")
    assert seen(roots.run) == before
    assert os.listdir(roots.pruned) == ["run-000016"]
    assert read_record(roots.record) == {RUN: moved}


def test_without_its_prune_root_a_run_is_left_and_the_root_not_made(roots: Roots) -> None:
    before = seen(roots.run)
    shutil.rmtree(roots.pruned)
    assert roots.prune().left == f"the prune root {roots.pruned} is missing"
    assert seen(roots.run) == before
    assert not roots.pruned.exists()
    assert read_record(roots.record)[RUN].left == f"the prune root {roots.pruned} is missing"


def test_where_the_record_cannot_be_written_the_run_stays(roots: Roots) -> None:
    before, record = seen(roots.run), roots.output / "nowhere" / "pruned.jsonl"
    moved = prune(roots.run, roots.pruned, record, why=WHY, at=AT)
    assert moved.left == f"the record cannot be written: No such file or directory ({record})"
    assert seen(roots.run) == before
    assert os.listdir(roots.pruned) == ["run-000016"]


def test_what_is_no_folder_is_left(roots: Roots) -> None:
    shutil.rmtree(roots.run)
    roots.run.symlink_to("run-000018")
    assert roots.prune().left == f"Not a directory ({roots.run})"
    assert os.readlink(roots.run) == "run-000018"


@renaming
def test_what_the_system_will_not_move_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_busy(source: Any, target: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", is_busy)
    check_left(roots, seen(roots.run), "Device or resource busy")


@copying
def test_where_the_copy_finds_no_room_the_run_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_until_full(source: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    monkeypatch.setattr(shutil, "copyfile", copy_until_full)
    check_left(roots, seen(roots.run), "No space left on device")


@as_root
def test_on_a_full_disk_the_run_is_left(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        roots = Roots(output=tmp_path / "out", pruned=disk / "pruned")
        roots.fill()
        write(roots.run / "deep" / "large", bytes(100_000))
        check_left(roots, seen(roots.run), "No space left on device")


@copying
def test_a_run_that_changes_while_it_is_copied_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def written_meanwhile(source: str, target: str, **options: Any) -> None:
        copyfile(source, target, **options)
        if source.endswith("log.txt"):
            Path(source).write_bytes(b"still at it")

    monkeypatch.setattr(shutil, "copyfile", written_meanwhile)
    assert roots.prune().left == f"it changed while it was copied ({roots.run})"
    assert (roots.run / "log.txt").read_bytes() == b"still at it"
    assert os.listdir(roots.pruned) == ["run-000016"]


@copying
def test_what_cannot_be_copied_is_left(roots: Roots) -> None:
    os.mkfifo(roots.run / "pipe")
    moved = roots.prune()
    assert moved.left == f"neither a file nor a folder, and cannot be copied ({roots.run / 'pipe'})"
    assert (roots.run / "log.txt").exists()
    assert os.listdir(roots.pruned) == ["run-000016"]


@copying
def test_a_file_that_came_after_the_copy_is_not_removed(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = seen(roots.run), os.rename

    def late(source: Any, target: Any) -> None:
        rename(source, target)
        write(roots.run / "late.png", b"a frame")

    monkeypatch.setattr(os, "rename", late)
    moved = roots.prune()
    assert (moved.to, read_record(roots.record)) == (str(roots.pruned / RUN), {RUN: moved})
    assert "cannot be removed here: Directory not empty" in (moved.left or "")
    assert seen(roots.pruned / RUN) == before
    assert (roots.run / "late.png").read_bytes() == b"a frame"


@contextlib.contextmanager
def roots_of_nobody() -> Iterator[Roots]:
    """With folders in the run that may not be written; pytest's own folder would let nobody in."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        roots = Roots(output=Path(folder, "out"), pruned=Path(folder, "pruned"))
        roots.fill()
        subprocess.run(["chown", "-hR", str(NOBODY), roots.output, roots.pruned], check=True)
        os.chmod(roots.run / "deep" / "er", 0o555)
        os.chmod(roots.run, 0o555)
        yield roots


def prune_as_nobody(connection: Connection, roots: Roots) -> None:
    os.setuid(NOBODY)
    os.rename = rename_within_folders_only  # type: ignore[assignment]
    connection.send(roots.prune())


def copy_in_vain_as_nobody(connection: Connection, roots: Roots) -> None:
    def refuse(source: Any, target: Any) -> None:
        is_copy = os.path.dirname(source) == os.path.dirname(target)
        raise OSError(errno.EIO if is_copy else errno.EXDEV, "no", str(source), None, str(target))

    os.setuid(NOBODY)
    os.rename = refuse  # type: ignore[assignment]
    connection.send(roots.prune())


@as_root
def test_what_cannot_be_removed_after_the_copy_is_told_and_removed_when_it_can_be() -> None:
    with roots_of_nobody() as roots:
        before = seen(roots.run)
        with child(prune_as_nobody, roots) as pruning:
            told = pruning.hear()
        assert "cannot be removed here: Permission denied" in told.left
        assert (told.to, seen(Path(told.to))) == (str(roots.pruned / RUN), before)
        for folder in (roots.run, roots.run / "deep" / "er"):
            os.chmod(folder, 0o755)
        with child(prune_as_nobody, roots) as pruning:
            assert (pruning.hear().left, read_record(roots.record)[RUN].left) == (None, None)
        assert not roots.run.exists()
        assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]


@as_root
def test_a_copy_that_came_to_nothing_is_removed_with_what_may_not_be_written() -> None:
    with roots_of_nobody() as roots:
        with child(copy_in_vain_as_nobody, roots) as pruning:
            assert pruning.hear().left.startswith("no (")
        assert os.listdir(roots.pruned) == ["run-000016"]


@copying
@pytest.mark.linux("file names that are not UTF-8")
def test_names_that_are_no_text_are_copied_and_told(roots: Roots) -> None:
    odd = os.fsdecode(b"frame-\xff.png")
    (roots.run / odd).touch()
    os.mkfifo(roots.run / f"{odd}.pipe")
    told = roots.prune()
    assert f"{odd}.pipe" in (told.left or "")
    assert read_record(roots.record) == {RUN: told}
    (roots.run / f"{odd}.pipe").unlink()
    assert odd in os.listdir(roots.prune().to or "")
