import contextlib
import errno
import os
import resource
import socket
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, has_frame, make_roots
from tests.scale import size
from tests.small_disk import mounted_disk
from tests.unit.ledger import as_root, child
from tests.unit.recipes import OTHER_UID, RUN, tree_of, write

# The roots


def test_roots_are_created_empty_with_their_parent_folders(tmp_path: Path) -> None:
    output, pruned = tmp_path / "data" / "out", tmp_path / "data" / "out-pruned"
    make_roots(output, pruned)
    make_roots(output, pruned)
    assert os.listdir(output) == os.listdir(pruned) == []


def test_without_a_prune_root_only_the_output_root_is_created(tmp_path: Path) -> None:
    make_roots(tmp_path / "out", None)
    assert os.listdir(tmp_path) == ["out"]


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


def test_an_unwritable_root_is_reported_before_the_first_run(tmp_path: Path) -> None:
    with child(make_on_a_full_disk, tmp_path / "out", tmp_path / "pruned") as maker:
        assert maker.receive() == f"cannot write to the output root {tmp_path / 'out'}: File too large"
    assert os.listdir(tmp_path / "out") == []


def test_a_disk_that_fails_on_fsync_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_quota(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", over_quota)
    assert refusal(tmp_path, None) == f"cannot write to the output root {tmp_path}: Disk quota exceeded"


@as_root
def test_a_full_and_a_read_only_disk_are_reported_before_the_first_run(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "full", "size=32k") as full:
        assert refusal(tmp_path / "out", full) == f"cannot write to the prune root {full}: No space left on device"
        assert os.listdir(full) == []
    with mounted_disk(tmp_path / "fixed", "ro") as fixed:
        assert refusal(fixed, None) == f"cannot write to the output root {fixed}: Read-only file system"
        assert refusal(fixed / "out", None) == f"cannot create the output root {fixed}/out: Read-only file system"


@as_root
def test_a_root_of_another_user_is_reported_before_the_first_run() -> None:
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
