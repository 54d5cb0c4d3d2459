"""Memory of another process is allocated ahead of it, and not a byte of it changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.suspend.prefault import Prefault, in_order, subtract
from tests.integration.engine_fixture import wait_for

pytestmark = pytest.mark.linux

MIB = 1 << 20
# Maps memory at each line, writes a pattern into the first part of it, and says so; at the end checks all of it.
WRITER = """
import ctypes, mmap, sys
size, written = int(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, written, 1 << 20):
    memory[start : start + (1 << 20)] = bytes([start // (1 << 20) % 250 + 1]) * (1 << 20)
print("written", flush=True)
sys.stdin.readline()
good = all(memory[start] == start // (1 << 20) % 250 + 1 for start in range(0, written, 4096))
print("good" if good and not any(memory[start] for start in range(written, size, 4096)) else "changed", flush=True)
"""
ranges = st.lists(st.integers(0, 30), unique=True).map(lambda ends: list(zip(*[iter(sorted(ends))] * 2, strict=False)))


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@pytest.mark.parametrize("most_mb", [256, 96])
def test_new_memory_is_allocated_without_a_change_of_its_content(most_mb: int) -> None:
    size, written = 256 * MIB, 4 * MIB
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(size), str(written)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        before_mb = resident_mb(program.pid)
        with Prefault(program.pid, most_mb * MIB, threads=2) as prefault:
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "written\n"
            wait_for(lambda: resident_mb(program.pid) - before_mb >= most_mb - 1, "the memory")
        assert prefault.refusal is None
        assert prefault.touched_bytes == most_mb * MIB
        assert resident_mb(program.pid) - before_mb <= most_mb + 24, "the program itself needs some, too"
        print(file=program.stdin, flush=True)
        assert program.stdout.readline() == "good\n"


def test_all_pieces_are_allocated_and_the_first_ones_last() -> None:
    """They are where the driver begins."""
    assert list(in_order(range(24))) == [*range(2, 24), 1, 0]
    assert list(in_order(range(3))) == [0, 1, 2]


def test_a_process_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen(["true"]) as program:
        program.wait()
        with Prefault(program.pid, 1 << 30) as prefault:
            pass
    assert prefault.touched_bytes == 0


@given(ranges, ranges)
def test_subtracting_ranges_leaves_what_is_only_in_the_first(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def numbers(of: list[tuple[int, int]]) -> set[int]:
        return {number for begin, end in of for number in range(begin, end)}

    left = subtract(first, second)
    assert numbers(left) == numbers(first) - numbers(second)
    assert all(begin < end for begin, end in left)
    assert left == sorted(left)
