"""Runs are moved, or left in place with a reason."""

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, has_frame, make_roots, prune, read_record
from tests.scale import size
from tests.small_disk import mounted_disk
from tests.unit.ledger import as_root, child
from tests.unit.recipes import AT, OTHER_UID, RUN, WHY, Roots, make_run, prune_and_die, tree_of, write

# The roots


def test_roots_are_created_empty_with_their_parent_folders(tmp_path: Path) -> None:
    output, pruned = tmp_path / "data" / "out", tmp_path / "data" / "out-pruned"
    make_roots(output, pruned)
    make_roots(output, pruned)
    assert os.listdir(output) == os.listdir(pruned) == []
    make_roots(tmp_path / "alone" / "out", None)
    assert os.listdir(tmp_path / "alone") == ["out"]


@pytest.mark.parametrize(
    ("output", "pruned", "message"),
    [
        ("out", "out", "are both"),
        ("out", "other/../out", "are both"),
        ("out", "out/a/pruned", "the prune root .* is inside the output root"),
        ("pruned/a/out", "pruned", "the output root .* is inside the prune root"),
        ("real/out", "link/out", "are both"),
        ("real", "link/new/pruned", "the prune root .* is inside"),
        ("link", "real/new/pruned", "the prune root .* is inside"),
        ("dangling/out", "later/out", "are both"),
    ],
)
def test_a_root_inside_the_other_is_refused_before_anything_is_created(
    output: str, pruned: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("later")
    before = tree_of(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        make_roots(tmp_path / output, tmp_path / pruned)
    assert caught.value.hint == "name a folder beside it with --prune-output-root"
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize("root", ["file", "file/out", "dangling"])
def test_a_file_in_place_of_a_root_is_a_user_error(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"the output root {tmp_path / root} cannot be a folder") as caught:
        make_roots(tmp_path / root, tmp_path / "pruned")
    assert caught.value.hint == "name another with --output-root"
    with pytest.raises(UserError, match=f"the prune root {tmp_path / root} cannot be a folder") as caught:
        make_roots(tmp_path / "out", tmp_path / root)
    assert caught.value.hint == "name another with --prune-output-root"
    assert (tmp_path / "file").read_text() == "a file"


def make_on_a_full_disk(connection: Connection, output: Path, pruned: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    connection.send(refusal(output, pruned))


def make_as_another_user(connection: Connection, output: Path) -> None:
    os.setuid(OTHER_UID)
    connection.send(refusal(output, None))


def refusal(output: Path, pruned: Path | None) -> str:
    try:
        make_roots(output, pruned)
    except EnvironmentFault as error:
        return error.message
    return "nothing was refused"


def test_a_root_that_cannot_be_written_is_reported_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(make_on_a_full_disk, tmp_path / "out", tmp_path / "pruned") as maker:
        assert maker.receive() == f"cannot write to the output root {tmp_path / 'out'}: File too large"
    assert os.listdir(tmp_path / "out") == []

    def over_quota(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", over_quota)
    assert refusal(tmp_path, None) == f"cannot write to the output root {tmp_path}: Disk quota exceeded"


@as_root
def test_roots_on_a_full_or_read_only_disk_or_of_others_are_reported(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "full", "size=32k") as full:
        assert refusal(tmp_path / "out", full) == f"cannot write to the prune root {full}: No space left on device"
        assert os.listdir(full) == []
    with mounted_disk(tmp_path / "fixed", "ro") as fixed:
        assert refusal(fixed, None) == f"cannot write to the output root {fixed}: Read-only file system"
        assert refusal(fixed / "out", None) == f"cannot create the output root {fixed}/out: Read-only file system"
    with child(make_as_another_user, Path("/var")) as maker:
        assert maker.receive() == "cannot write to the output root /var: Permission denied"
    with child(make_as_another_user, Path("/var/out")) as maker:
        assert maker.receive() == "cannot create the output root /var/out: Permission denied"


# Frames


@pytest.mark.parametrize(
    ("path", "content", "pattern", "has_one"),
    [
        ("0.png", b"x", ANY_FILE, True),
        ("0.png", b"", ANY_FILE, False),
        (".hidden", b"x", ANY_FILE, True),
        ("a/b/c/0.png", b"x", "*.png", True),
        ("a/b/c/0.png", b"", "*.png", False),
        ("log.txt", b"x", "*.png", False),
        ("x.png/log.txt", b"x", "*.png", False),
        ("0.PNG", b"x", "*.png", False),
        ("frames/0.png", b"x", "frames/*.png", True),
        ("frames/0.png", b"x", "./frames/*.png", True),
        ("frames/0.png", b"x", "/frames/*.png", True),
        ("frames/a/0.png", b"x", "frames/*.png", False),
        ("a/frames/0.png", b"x", "frames/*.png", False),
        ("frames/0.png", b"x", "frames/**/*.png", True),
        ("frames/a/b/0.png", b"x", "frames/**/*.png", True),
        ("a/b/frames/0.png", b"x", "**/frames/*.png", True),
        ("frames/a/b/0.png", b"x", "frames/**", True),
        ("frames/a/b/0.png", b"", "frames/**", False),
        ("0.png", b"x", "**/*.png", True),
    ],
)
def test_a_frame_is_a_matching_file_that_is_not_empty(
    path: str, content: bytes, pattern: str, has_one: bool, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.png").touch()
    write(tmp_path / path, content)
    assert has_frame(tmp_path, pattern) is has_one


def bind(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    "make", [bind, os.mkfifo, lambda path: path.symlink_to("/nowhere"), lambda path: path.symlink_to("/")]
)
def test_links_and_special_files_count_as_frames(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    assert not has_frame(tmp_path, "*.png")
    make(tmp_path / "deep" / "x")
    assert has_frame(tmp_path, "*.png")


def test_a_run_folder_that_is_a_link_counts_as_having_frames(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / RUN).symlink_to("empty")
    assert has_frame(tmp_path / RUN, "*.png")


NAMES = st.sampled_from(["a", "b", "a.png", "b.png", ".a"])
FILES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.sampled_from([b"", b"x"]), max_size=4)
PATTERNS = st.sampled_from(
    ["*", "a", "*.png", "?", "[ab]*", "a/*", "*/*", "**/b", "a/**/b.png", "**/a/**/*.png", "*/a"]
)


@settings(max_examples=size(40, full=150), deadline=None)
@given(FILES, PATTERNS)
def test_a_pattern_matches_like_in_pathlib(files: dict[tuple[str, ...], bytes], pattern: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for parts, content in files.items():
            with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):  # a file has this name
                write(run.joinpath(*parts), content)
        found = run.glob(pattern) if "/" in pattern else run.rglob(pattern)
        assert has_frame(run, pattern) == any(path.is_file() and path.stat().st_size for path in found)


def look_as_another_user(connection: Connection, run: Path) -> None:
    os.setuid(OTHER_UID)
    try:
        connection.send(has_frame(run, ANY_FILE))
    except EnvironmentFault as error:
        connection.send(error.message)


@as_root
def test_an_unreadable_folder_is_not_taken_for_empty() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "shut").mkdir(mode=0o700)
        with child(look_as_another_user, Path(folder)) as looking:
            assert looking.receive() == f"cannot look for frames in {folder}: Permission denied ({folder}/shut)"


def test_a_missing_run_is_not_taken_for_empty(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=f"cannot look for frames in {tmp_path / RUN}: No such file"):
        has_frame(tmp_path / RUN, ANY_FILE)


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
    (line,) = record_lines(roots)
    assert line.items() >= {"at": AT, "run": RUN, "to": moved.to, "why": WHY}.items()
    assert read_record(roots.record) == {RUN: moved}
    assert roots.prune() == moved


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


def test_a_run_is_left_without_its_record_or_its_prune_root(roots: Roots) -> None:
    before, record = tree_of(roots.run), roots.output / "nowhere" / "pruned.jsonl"
    moved = prune(roots.run, roots.pruned, record, why=WHY, at=AT)
    assert moved.left == f"the record cannot be written: No such file or directory ({record})"
    assert tree_of(roots.run) == before
    assert os.listdir(roots.pruned) == ["run-000016"]
    shutil.rmtree(roots.pruned)
    assert roots.prune().left == f"the prune root {roots.pruned} is missing"
    assert tree_of(roots.run) == before
    assert not roots.pruned.exists()
    assert read_record(roots.record)[RUN].left == f"the prune root {roots.pruned} is missing"


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


def test_after_a_kill_at_any_point_the_next_call_leaves_the_run_complete_at_one_place(roots: Roots) -> None:
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
