"""Runs are moved by renaming or by copying, or left in place with a reason."""

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
from typing import Any, BinaryIO

import pytest

from gpuyard.recipes.batch.prune_empty_runs import prune, read_record
from tests.small_disk import mounted_disk
from tests.unit.leases import as_root, child
from tests.unit.recipes import (
    AT,
    OTHER_UID,
    RUN,
    WHY,
    MoveMethod,
    Roots,
    copying,
    make_run,
    rename_within_folders_only,
    renaming,
    tree_of,
    write,
)


def record_lines(roots: Roots) -> list[dict[str, Any]]:
    return [json.loads(line) for line in roots.record.read_text().splitlines()]


@renaming
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


def test_a_moved_run_has_one_line_in_the_record(roots: Roots, method: MoveMethod) -> None:
    roots.prune()
    assert len(record_lines(roots)) == (3 if method == "mounted twice" else 1)


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
def test_a_new_run_of_the_same_name_is_moved_beside_the_old_run(roots: Roots, path: str, content: bytes | None) -> None:
    first, second = roots.pruned / RUN, roots.pruned / f"{RUN}.2"
    roots.prune()
    before = tree_of(first)
    make_again_with(roots.run, path, content)
    again = tree_of(roots.run)
    assert roots.prune().to == str(second)
    assert (tree_of(first), tree_of(second)) == (before, again)


@renaming
def test_a_run_identical_to_a_renamed_run_is_moved_beside_it(roots: Roots) -> None:
    roots.prune()
    make_run(roots.run)
    assert roots.prune().to == str(roots.pruned / f"{RUN}.2")
    assert (roots.pruned / RUN / "log.txt").read_bytes() == (roots.pruned / f"{RUN}.2" / "log.txt").read_bytes()


@copying
def test_a_run_identical_to_its_copy_is_not_copied_again(roots: Roots) -> None:
    first = roots.prune()
    before = tree_of(roots.pruned / RUN)
    make_run(roots.run)
    assert roots.prune() == first
    assert not roots.run.exists()
    assert tree_of(roots.pruned / RUN) == before
    assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]


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


@renaming
def test_a_run_that_cannot_be_renamed_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_busy(source: Any, target: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", is_busy)
    check_left(roots, tree_of(roots.run), "Device or resource busy")


@copying
def test_a_run_is_left_if_its_copy_fills_the_disk(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_until_full(source: BinaryIO, target: BinaryIO) -> None:
        target.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", copy_until_full)
    check_left(roots, tree_of(roots.run), "No space left on device")


@as_root
def test_on_a_full_disk_the_run_is_left(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "size=64k") as disk:
        roots = Roots(output=tmp_path / "out", pruned=disk / "pruned")
        roots.fill()
        write(roots.run / "deep" / "large", bytes(100_000))
        check_left(roots, tree_of(roots.run), "No space left on device")


@copying
def test_a_run_that_changes_while_it_is_copied_is_left(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copyfileobj

    def written_meanwhile(source: BinaryIO, target: BinaryIO) -> None:
        copy(source, target)
        (roots.run / "log.txt").write_bytes(b"still at it")

    monkeypatch.setattr(shutil, "copyfileobj", written_meanwhile)
    assert roots.prune().left == f"it changed while it was copied ({roots.run})"
    assert (roots.run / "log.txt").read_bytes() == b"still at it"
    assert os.listdir(roots.pruned) == ["run-000016"]


@copying
def test_a_run_that_cannot_be_copied_is_left(roots: Roots) -> None:
    os.mkfifo(roots.run / "pipe")
    moved = roots.prune()
    assert moved.left == f"neither a file nor a folder, and cannot be copied ({roots.run / 'pipe'})"
    assert (roots.run / "log.txt").exists()
    assert os.listdir(roots.pruned) == ["run-000016"]


@copying
def test_a_file_created_after_the_copy_is_not_removed(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = tree_of(roots.run), os.rename

    def late(source: Any, target: Any) -> None:
        rename(source, target)
        write(roots.run / "late.png", b"a frame")

    monkeypatch.setattr(os, "rename", late)
    moved = roots.prune()
    assert (moved.to, read_record(roots.record)) == (str(roots.pruned / RUN), {RUN: moved})
    assert "cannot be removed here: Directory not empty" in (moved.left or "")
    assert tree_of(roots.pruned / RUN) == before
    assert (roots.run / "late.png").read_bytes() == b"a frame"


@contextlib.contextmanager
def roots_of_another_user() -> Iterator[Roots]:
    """Yield roots with read-only folders in the run, outside of pytest's folder, which is closed to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        roots = Roots(output=Path(folder, "out"), pruned=Path(folder, "pruned"))
        roots.fill()
        subprocess.run(["chown", "-hR", str(OTHER_UID), roots.output, roots.pruned], check=True)
        os.chmod(roots.run / "deep" / "er", 0o555)
        os.chmod(roots.run, 0o555)
        yield roots


def prune_as_another_user(connection: Connection, roots: Roots) -> None:
    os.setuid(OTHER_UID)
    os.rename = rename_within_folders_only  # type: ignore[assignment]
    connection.send(roots.prune())


def fail_to_copy_as_another_user(connection: Connection, roots: Roots) -> None:
    def refuse(source: Any, target: Any) -> None:
        is_copy = os.path.dirname(source) == os.path.dirname(target)
        raise OSError(errno.EIO if is_copy else errno.EXDEV, "no", str(source), None, str(target))

    os.setuid(OTHER_UID)
    os.rename = refuse  # type: ignore[assignment]
    connection.send(roots.prune())


@as_root
def test_files_that_cannot_be_removed_after_the_copy_are_reported_and_removed_later() -> None:
    with roots_of_another_user() as roots:
        before = tree_of(roots.run)
        with child(prune_as_another_user, roots) as pruning:
            pruned_run = pruning.receive()
        assert "cannot be removed here: Permission denied" in pruned_run.left
        assert (pruned_run.to, tree_of(Path(pruned_run.to))) == (str(roots.pruned / RUN), before)
        for folder in (roots.run, roots.run / "deep" / "er"):
            os.chmod(folder, 0o755)
        with child(prune_as_another_user, roots) as pruning:
            assert (pruning.receive().left, record_lines(roots)[-1].get("left")) == (None, None)
        assert not roots.run.exists()
        assert sorted(os.listdir(roots.pruned)) == ["run-000016", RUN]


@as_root
def test_a_failed_copy_is_removed_with_its_read_only_folders() -> None:
    with roots_of_another_user() as roots:
        with child(fail_to_copy_as_another_user, roots) as pruning:
            assert pruning.receive().left.startswith("no (")
        assert os.listdir(roots.pruned) == ["run-000016"]


@copying
@pytest.mark.linux("file names that are not UTF-8")
def test_names_that_are_not_text_are_copied_and_reported(roots: Roots) -> None:
    odd = os.fsdecode(b"frame-\xff.png")
    (roots.run / odd).touch()
    os.mkfifo(roots.run / f"{odd}.pipe")
    pruned_run = roots.prune()
    assert f"{odd}.pipe" in (pruned_run.left or "")
    assert read_record(roots.record) == {RUN: pruned_run}
    (roots.run / f"{odd}.pipe").unlink()
    assert odd in os.listdir(roots.prune().to or "")
