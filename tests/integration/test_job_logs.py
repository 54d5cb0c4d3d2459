"""Logs are truncated while programs write to them, and readers neither miss nor repeat a line."""

import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuyard.engines.common import job_logs
from tests.integration.engine_fixture import wait_for

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
COLLAPSE_OR_COPY = pytest.mark.parametrize("can_collapse", [True, False], ids=["collapse", "copy"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return job_logs.path_of(tmp_path, 17, 1)


def use(monkeypatch: pytest.MonkeyPatch, path: Path, *, can_collapse: bool) -> None:
    if not can_collapse:
        monkeypatch.setattr(job_logs, "_fallocate", lambda: None)
        return
    probe = path.with_name("probe")
    probe.write_bytes(b"x" * BLOCK * 3)
    with probe.open("r+b") as file:
        call = job_logs._fallocate()
        if call is None or call(file.fileno(), 0x08, 0, BLOCK) != 0:
            pytest.skip("this file system cannot take a range out of a file")
    probe.unlink()


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
        for chunk in job_logs.follow(path, is_over.is_set):
            got.extend(chunk)

    follower = threading.Thread(target=read)
    follower.start()
    return got, is_over, follower


def numbers(content: bytes) -> list[int]:
    return [int(line.split()[0]) for line in content.splitlines() if line]


def whole(content: bytes) -> list[int]:
    """Return the numbers of all complete lines."""
    lines = [line for line in content.split(b"\n") if line[:8].isdigit() and len(line) >= 9]
    return [int(line[:8]) for line in lines if len(line) == 9 + int(line[:8]) % 150]


def kept(path: Path) -> bytes:
    old = path.with_name(f"{path.name}.1")
    return (old.read_bytes() if old.exists() else b"") + path.read_bytes()


def test_a_log_is_named_after_its_attempt(path: Path) -> None:
    assert path.name == "17.1.log"


def test_a_log_within_its_limit_or_missing_is_left_alone(path: Path) -> None:
    assert not job_logs.rotate_if_over(path, 10)
    path.write_bytes(b"0123456789")
    assert not job_logs.rotate_if_over(path, 10)
    assert path.read_bytes() == b"0123456789"


@COLLAPSE_OR_COPY
def test_truncation_keeps_the_newest_lines_and_writers_continue(
    path: Path, monkeypatch: pytest.MonkeyPatch, can_collapse: bool
) -> None:
    use(monkeypatch, path, can_collapse=can_collapse)
    cap = 16 * BLOCK
    written = b""
    with path.open("ab", buffering=0) as log:
        for generation in range(3):
            text = b"".join(b"%d %06d\n" % (generation, number) for number in range(cap // 9 + 100))
            log.write(text)
            written += text
            assert job_logs.rotate_if_over(path, cap)
            assert path.stat().st_size <= BLOCK
        log.write(b"the end\n")
        written += b"the end\n"
    content = kept(path)
    assert written.endswith(content)
    assert cap < len(content) < 2 * cap + 2 * BLOCK
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob("17.1.log.*")} == {0o600}


def cut_under_a_writer(path: Path) -> tuple[bytes, int]:
    """Truncate under a writer that never pauses. Return everything cut off and left, and how many lines it wrote."""
    parts: list[bytes] = []
    with writing(path, 60_000) as writer:
        while writer.poll() is None:
            if job_logs.rotate_if_over(path, 64 * BLOCK):
                parts.append(path.with_name(f"{path.name}.1").read_bytes())
            if len(parts) > 3:
                tell_to_end(writer)
        assert writer.stdout is not None
        count = int(writer.stdout.read())
    return b"".join([*parts, path.read_bytes()]), count


def test_truncation_under_a_writer_that_never_pauses_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, path, can_collapse=True)
    content, count = cut_under_a_writer(path)
    assert numbers(content) == list(range(count))


def test_truncation_by_copying_repeats_nothing_and_keeps_the_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, path, can_collapse=False)
    content, count = cut_under_a_writer(path)
    seen = whole(content)
    assert seen == sorted(set(seen))
    assert seen[-1] > count - 10_000


@COLLAPSE_OR_COPY
def test_a_follower_sees_every_line_once_across_truncations(
    path: Path, monkeypatch: pytest.MonkeyPatch, can_collapse: bool
) -> None:
    """If truncation copies, write lines only between truncations: copying is known to lose lines written meanwhile."""
    use(monkeypatch, path, can_collapse=can_collapse)
    got, is_over, follower = following(path)
    cuts, total = 0, 0
    with path.open("ab", buffering=0) as log:
        for start in range(0, 30_000, 500):
            log.write(b"".join(b"%08d\n" % number for number in range(start, start + 500)))
            total += 4500
            wait_for(lambda: len(got) > total - 3 * BLOCK, "the follower")  # noqa: B023
            cuts += job_logs.rotate_if_over(path, 4 * BLOCK)
    is_over.set()
    follower.join()
    assert numbers(bytes(got)) == list(range(30_000))
    assert cuts > 5


def test_a_follower_of_a_fast_writer_sees_lines_in_order_across_truncations(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower may fall behind by more than is kept; its lines are still in order, and complete at the end."""
    use(monkeypatch, path, can_collapse=True)
    got, is_over, follower = following(path)
    with writing(path, 60_000) as writer:
        tell_to_end(writer)  # as soon as it has written as many
        while writer.poll() is None:
            job_logs.rotate_if_over(path, 512 * BLOCK)
    is_over.set()
    follower.join()
    seen = whole(bytes(got))
    assert seen == sorted(set(seen))
    assert seen[-1] == 59_999


def test_a_follower_waits_for_a_log_and_ends_after_its_last_line(path: Path) -> None:
    states = iter([False, False, True, True])

    def is_over() -> bool:
        state = next(states)
        if state:
            path.write_bytes(b"late\n")
        return state

    assert b"".join(job_logs.follow(path, is_over)) == b"late\n"


def test_a_follower_can_begin_at_the_last_lines(path: Path) -> None:
    path.write_bytes(b"1\n2\n3\n")
    assert b"".join(job_logs.follow(path, lambda: True, lines=2)) == b"2\n3\n"


@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("lines", [0, 1, 2, 5, 10_000, 30_000, 10**6])
def test_the_tail_has_the_last_lines_even_across_a_truncation(path: Path, lines: int, ending: bytes) -> None:
    text = b"\n".join(b"%06d" % number for number in range(25_000)) + ending
    path.write_bytes(text[:100_000])
    assert job_logs.rotate_if_over(path, 50_000)
    with path.open("ab") as log:
        log.write(text[100_000:])
    expected = b"".join(text.splitlines(keepends=True)[-lines:]) if lines else b""
    assert job_logs.read_tail(path, lines) == expected


def test_the_tail_of_a_missing_or_empty_log_is_empty(path: Path) -> None:
    assert job_logs.read_tail(path, 5) == b""
    path.touch()
    assert job_logs.read_tail(path, 5) == b""


def test_a_log_that_is_being_read_is_truncated_later(path: Path) -> None:
    import fcntl

    path.write_bytes(b"x" * 5 * BLOCK)
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not job_logs.rotate_if_over(path, BLOCK)
    assert job_logs.rotate_if_over(path, BLOCK)


def test_a_truncation_without_disk_space_leaves_the_log_unchanged(path: Path) -> None:
    text = bytes(range(256)) * 16 * 5
    path.write_bytes(text)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            job_logs.rotate_if_over(path, BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept(path) == text
    assert b"".join(job_logs.follow(path, lambda: True)) == text


def test_removing_deletes_all_files_of_the_attempt_and_none_of_others(path: Path) -> None:
    path.write_bytes(b"x" * 5 * BLOCK)
    job_logs.rotate_if_over(path, BLOCK)
    other = job_logs.path_of(path.parent, 17, 11)
    other.touch()
    job_logs.remove_logs(path.parent, 17, 1)
    job_logs.remove_logs(path.parent, 17, 1)
    assert os.listdir(path.parent) == [other.name]
