"""The middle of a log is cut out while programs write to it, and readers neither miss nor repeat a line."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuyard.engines.common import job_logs, log_cap
from gpuyard.engines.common.job_logs import LogCursor
from gpuyard.engines.common.log_cap import LogCaps, cut_if_over
from gpuyard.engines.local.engine import LocalEngine
from tests.integration.engine_fixture import launch_of, outcome_of, wait_for

BLOCK = 4096
# Writes N lines, continues until its input ends, and prints how many lines it wrote.
WRITER = """
import os, select, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
least, number = int(sys.argv[2]), 0
while number < least or number % 1000 or not select.select([0], [], [], 0)[0]:
    os.write(log, b"%08d " % number + b"x" * (number % 150) + b"\\n")
    number += 1
print(number)
"""
HOLE_OR_COPY = pytest.mark.parametrize("has_holes", [True, False], ids=["hole", "copy"])
CUT_LINE = b"cut out here"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / job_logs.name_of(17, 1)


def use(monkeypatch: pytest.MonkeyPatch, path: Path, *, has_holes: bool) -> None:
    if not has_holes:
        monkeypatch.setattr(log_cap, "_fallocate", lambda: None)
        return
    probe = path.with_name("probe")
    probe.write_bytes(b"x" * BLOCK * 3)
    with probe.open("r+b") as file:
        if not log_cap._punch(file.fileno(), BLOCK, BLOCK) or log_cap.find_hole(file.fileno()) != (BLOCK, 2 * BLOCK):
            pytest.skip("this file system cannot make holes")
    probe.unlink()


def cut(path: Path, cap: int) -> int:
    return cut_if_over(str(path), cap)


@contextmanager
def writing(path: Path, count: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", WRITER, str(path), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        yield writer
    assert writer.returncode == 0


def tell_to_end(writer: "subprocess.Popen[bytes]") -> None:
    assert writer.stdin is not None
    writer.stdin.close()


def following(path: Path) -> tuple[bytearray, threading.Event, threading.Thread]:
    """The lines that a follower has read so far, and the flag that ends it."""
    got, is_over = bytearray(), threading.Event()

    def read() -> None:
        for _, chunk in job_logs.follow([LogCursor(path)], is_over.is_set):
            got.extend(chunk)

    follower = threading.Thread(target=read)
    follower.start()
    return got, is_over, follower


def read_whole(path: Path) -> bytes:
    return read_tail(path, None)


def read_tail(path: Path, lines: int | None, is_over: Callable[[], bool] = lambda: True) -> bytes:
    return b"".join(chunk for _, chunk in job_logs.follow([LogCursor(path, lines)], is_over))


def numbers(content: bytes) -> list[int]:
    return [int(line.split()[0]) for line in content.splitlines() if line]


def whole(content: bytes) -> list[int]:
    """Return the numbers of all complete lines."""
    lines = [line for line in content.split(b"\n") if line[:8].isdigit() and len(line) >= 9]
    return [int(line[:8]) for line in lines if len(line) == 9 + int(line[:8]) % 150]


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def parts(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what is before and after the line about the cut, and that line."""
    before, _, rest = content.partition(b"\n[gpuyard: ")
    line, _, after = rest.partition(b"]\n")
    return before, after, line


def test_a_log_is_named_after_its_attempt(path: Path) -> None:
    assert path.name == "17.1.log"


def test_a_log_within_its_cap_is_left_alone(path: Path) -> None:
    path.write_bytes(b"0123456789")
    assert cut(path, 10) == 0
    assert cut(path, 15) == 5
    assert path.read_bytes() == b"0123456789"
    with pytest.raises(FileNotFoundError):
        cut(path.with_name("missing"), 10)


@HOLE_OR_COPY
def test_a_cut_log_has_its_first_and_its_newest_output_and_says_how_much_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_holes: bool
) -> None:
    use(monkeypatch, path, has_holes=has_holes)
    cap = 16 * BLOCK
    written = b""
    with path.open("ab", buffering=0) as log:
        for generation in range(3):
            text = b"".join(b"%d %06d\n" % (generation, number) for number in range(3 * cap // 9))
            log.write(text)
            written += text
            assert cut(path, cap) > 0
            assert on_disk(path) <= cap
        log.write(b"the end\n")
        written += b"the end\n"
    first, last, line = parts(read_whole(path))
    assert written.startswith(first)
    assert written.endswith(last)
    assert cap // 4 <= len(first)
    assert cap // 2 - 2 * BLOCK < len(last) <= cap // 2 + 2 * BLOCK
    if has_holes:
        missing = len(written) - len(first) - len(last)
        assert line == f"{missing:,} bytes are cut out here: the log is over its cap (--log-cap)".encode()
        assert path.stat().st_size == len(written)


def test_cutting_under_a_writer_that_never_pauses_loses_nothing_of_the_newest_output(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, path, has_holes=True)
    cuts = 0
    with writing(path, 60_000) as writer:
        wait_for(path.exists, "the writer")
        while writer.poll() is None:
            before = on_disk(path)
            cut(path, 64 * BLOCK)
            cuts += on_disk(path) < before
            if cuts > 3:
                tell_to_end(writer)
        assert writer.stdout is not None
        count = int(writer.stdout.read())
    first, last, _ = parts(read_whole(path))
    assert numbers(first)[:100] == list(range(100))
    assert numbers(last) == list(range(numbers(last)[0], count))


def test_cutting_by_copying_repeats_nothing_and_keeps_the_last_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, path, has_holes=False)
    with writing(path, 60_000) as writer:
        wait_for(path.exists, "the writer")
        tell_to_end(writer)
        while writer.poll() is None:
            cut(path, 64 * BLOCK)
        assert writer.stdout is not None
        count = int(writer.stdout.read())
    seen = whole(read_whole(path))
    assert len(seen) == len(set(seen))
    assert max(seen) > count - 10_000
    assert min(seen) == 0


def test_a_follower_sees_every_line_once_across_cuts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, path, has_holes=True)
    got, is_over, follower = following(path)
    cuts = 0
    with path.open("ab", buffering=0) as log:
        for start in range(0, 30_000, 500):
            log.write(b"".join(b"%08d\n" % number for number in range(start, start + 500)))
            wait_for(lambda: got.endswith(b"%08d\n" % (start + 499)), "the follower")  # noqa: B023
            before = on_disk(path)
            cut(path, 8 * BLOCK)
            cuts += on_disk(path) < before
    is_over.set()
    follower.join()
    lines = [line for line in bytes(got).splitlines() if line and CUT_LINE not in line]
    assert list(map(int, lines)) == list(range(30_000))
    assert cuts > 5


def test_a_follower_of_a_log_that_became_shorter_goes_on_at_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, path, has_holes=False)
    got, is_over, follower = following(path)
    path.write_bytes(b"line\n" * 20 * BLOCK)
    wait_for(lambda: len(got) == 100 * BLOCK, "the follower")
    cut(path, 8 * BLOCK)
    wait_for(lambda: CUT_LINE in got, "the line about it")
    with path.open("ab") as log:
        log.write(b"the end\n")
    is_over.set()
    follower.join()
    assert bytes(got).endswith(b"some output is cut out here: the log is over its cap (--log-cap)]\nthe end\n")


def test_a_follower_of_a_fast_writer_sees_lines_in_order_and_no_zero_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower may fall behind by more than is kept; its lines are still in order, and complete at the end."""
    use(monkeypatch, path, has_holes=True)
    got, is_over, follower = following(path)
    with writing(path, 60_000) as writer:
        tell_to_end(writer)  # as soon as it has written as many
        wait_for(path.exists, "the writer")
        while writer.poll() is None:
            cut(path, 16 * BLOCK)
    is_over.set()
    follower.join()
    seen = whole(bytes(got))
    assert seen == sorted(set(seen))
    assert seen[-1] == 59_999
    assert b"\0" not in got


def test_a_follower_waits_for_a_log_and_ends_after_its_last_line(path: Path) -> None:
    states = iter([False, False, True, True])

    def is_over() -> bool:
        state = next(states)
        if state:
            path.write_bytes(b"late\n")
        return state

    assert read_tail(path, None, is_over) == b"late\n"


def test_a_follower_can_begin_at_the_last_lines(path: Path) -> None:
    path.write_bytes(b"1\n2\n3\n")
    assert read_tail(path, 2) == b"2\n3\n"


@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("lines", [0, 1, 2, 5, 3_000])
def test_the_tail_has_the_last_lines_of_a_cut_log(path: Path, lines: int, ending: bytes) -> None:
    text = b"\n".join(b"%06d" % number for number in range(25_000)) + ending
    path.write_bytes(text)
    cut(path, 65_536)
    expected = b"".join(text.splitlines(keepends=True)[-lines:]) if lines else b""
    assert read_tail(path, lines) == expected


def test_the_tail_of_a_cut_log_goes_back_to_the_cut_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, path, has_holes=True)
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(25_000)))
    cut(path, 65_536)
    first, last, _ = parts(read_tail(path, 20_000))
    assert first == b""
    assert numbers(last) == list(range(numbers(last)[0], 25_000))


def test_the_tail_of_a_missing_or_empty_log_is_empty(path: Path) -> None:
    assert read_tail(path, 5) == b""
    path.touch()
    assert read_tail(path, 5) == b""


# The watch


def test_a_quiet_log_is_looked_at_once_a_second_and_a_growing_one_before_it_can_reach_its_cap(path: Path) -> None:
    caps, other = LogCaps(), path.with_name("18.1.log")
    for each in (path, other):
        each.write_bytes(b"x")
        caps.add(str(each), 64 * BLOCK)
    path.unlink()
    looks = 0
    while (wait_ms := caps.timeout_ms() or 0.0) < 500:
        looks += 1
        time.sleep(wait_ms / 1000)
        caps.run()
    assert looks <= 24
    with other.open("ab") as log:
        log.write(b"line\n" * 100 * BLOCK)

    def is_cut() -> bool:
        caps.run()
        return on_disk(other) <= 64 * BLOCK

    wait_for(is_cut, "the cut")
    assert (caps.timeout_ms() or 0.0) < 100


def test_a_removed_log_is_cut_for_the_last_time_and_no_longer_watched(path: Path) -> None:
    caps = LogCaps()
    caps.add(str(path), 64 * BLOCK)
    path.write_bytes(b"line\n" * 100 * BLOCK)
    caps.remove(str(path))
    caps.remove(str(path))
    assert on_disk(path) <= 64 * BLOCK
    assert caps.timeout_ms() is None


def test_a_program_that_writes_at_full_speed_keeps_no_more_than_its_cap(engine: LocalEngine, folder: Path) -> None:
    launch = launch_of(1, "sh", "-c", "yes | head -c 400000000; echo the end", log_cap_mb=1.0)
    assert outcome_of(engine, launch).status == 0
    log = folder / "logs" / "1.1.log"
    assert on_disk(log) <= 1 << 20
    first, last, line = parts(read_whole(log))
    assert first.startswith(b"y\ny\n")
    assert last.endswith(b"y\nthe end\n")
    assert CUT_LINE in line


def test_the_log_of_a_process_that_was_left_behind_stays_within_its_cap(engine: LocalEngine, folder: Path) -> None:
    script = "(yes | head -c 100000000; echo the end; exec sleep 600) & echo $! > pid"
    launch = launch_of(1, "sh", "-c", script, cwd=str(folder), log_cap_mb=1.0)
    assert outcome_of(engine, launch).status == 0
    log = folder / "logs" / "1.1.log"
    wait_for(lambda: read_tail(log, 1) == b"the end\n", "its output")
    wait_for(lambda: on_disk(log) <= 1 << 20, "the cut")
    os.kill(int((folder / "pid").read_text()), 9)
