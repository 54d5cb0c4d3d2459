"""A task's output in a file, and files that are written atomically."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.common.job_logs import LogCursor
from gpuyard.engines.session.task_files import Output, printable, write_whole


def written(path: Path, chunks: list[bytes]) -> bytes:
    path.write_bytes(b"")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    output = Output(descriptor, str(path))
    for chunk in chunks:
        output.write(chunk)
    output.finish()
    os.close(descriptor)
    assert output.problem is None
    return path.read_bytes()


@given(chunks=st.lists(st.lists(st.sampled_from([b"\r", b"\n", b"a"]), max_size=6).map(b"".join)))
def test_cr_lf_becomes_lf_for_any_split(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "output"
    assert written(path, chunks) == b"".join(chunks).replace(b"\r\n", b"\n")


def test_a_progress_line_keeps_its_carriage_returns_and_other_controls_are_replaced(tmp_path: Path) -> None:
    assert written(tmp_path / "log", [b"10%\r", b"20%\r", b"done\r\n"]) == b"10%\r20%\rdone\n"
    assert printable("a\nb\x1b[2Jc ä\udcff") == "a?b?[2Jc ä\udcff"


def test_output_over_its_cap_is_cut_as_it_is_written(tmp_path: Path) -> None:
    path, cap = tmp_path / "log", 1 << 17
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    output = Output(descriptor, str(path), cap)
    most = 0
    for number in range(1000):
        output.write(b"%06d\n" % number * 500)
        most = max(most, path.stat().st_blocks * 512)
    os.close(descriptor)
    assert most <= 2 * cap
    assert output.problem is None
    assert LogCursor(path, 1).read() == b"000999\n"


@pytest.mark.linux("/dev/full")
def test_a_full_disk_is_reported_with_the_path(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = Output(descriptor, "/logs/exp1.log")
    output.write(b"text")
    os.close(descriptor)
    assert output.problem == "some of the output is missing in /logs/exp1.log: No space left on device"


def test_a_file_is_replaced_and_no_temporary_file_is_left_also_by_a_failure(tmp_path: Path) -> None:
    write_whole(str(tmp_path / "new/marker.txt"), "first")
    write_whole(str(tmp_path / "new/marker.txt"), "second \udcff")
    assert (tmp_path / "new/marker.txt").read_bytes() == b"second \xff"
    assert os.listdir(tmp_path / "new") == ["marker.txt"]
    (tmp_path / "marker.txt").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_whole(str(tmp_path / "marker.txt"), "text")
    assert sorted(os.listdir(tmp_path)) == ["marker.txt", "new"]


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = tmp_path / "records" / "task"
    write_whole(str(record), "before")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_whole(str(record), "after")
    assert [(file.name, file.read_text()) for file in record.parent.iterdir()] == [("task", "before")]
