"""Reading a log in parts while it is written."""

import fcntl
import threading
from pathlib import Path

from gpuyard.daemon.api.logs import LogChunk, read_piece
from gpuyard.engines.common.log_cap import cut_if_over


def test_the_last_part_comes_first_and_then_new_output(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    before = read_piece(log, None, 4, 100)
    log.write_bytes(b"0123456789")
    assert read_piece(log, before.ends, 4, 100) == LogChunk(data=b"0123456789", ends=10, is_cut=False)
    log.write_bytes(b"0123456789")
    assert read_piece(log, None, 4, 3) == LogChunk(data=b"678", ends=9, is_cut=True)
    assert read_piece(log, 9, 4, 3) == LogChunk(data=b"9", ends=10, is_cut=False)
    assert read_piece(log, 10, 4, 3) == LogChunk(data=b"", ends=10, is_cut=False)
    log.write_bytes(b"x" * 3_000_000 + b"end")
    assert read_piece(log, 1000, 4, 100) == LogChunk(data=b"xend", ends=3_000_003, is_cut=True)


def test_output_that_was_cut_out_before_it_was_read_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    for _ in range(2):
        with log.open("ab") as file:
            file.write(b"x" * 20_000)
        cut_if_over(str(log), 10_000)
    found = read_piece(log, 5_000, 5, 100)
    assert (found.data, found.ends, found.is_cut) == (b"xxxxx", 40_000, True)


def test_a_log_that_its_program_has_locked_can_be_read(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    log.write_bytes(b"written")
    with log.open("ab") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        pieces: list[LogChunk] = []
        reader = threading.Thread(target=lambda: pieces.append(read_piece(log, None, 100, 100)), daemon=True)
        reader.start()
        reader.join(30.0)
        assert [piece.data for piece in pieces] == [b"written"]
