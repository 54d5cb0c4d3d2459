"""Evidence of a failed attempt is read from the kernel and the log; missing evidence is not an error."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.engines.common import job_logs
from gpuyard.engines.common import program_outcome as oom_evidence
from gpuyard.engines.common.log_cap import cut_if_over
from gpuyard.model.out_of_memory import ShortageKind, recognise

EVENTS = "low 0\nhigh 3\nmax 17\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / job_logs.name_of(17, 1)


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_tail_of_a_short_log_is_all_of_it(log: Path) -> None:
    log.write_text("first\nlast\n")
    assert oom_evidence.read_tail(log) == "first\nlast\n"


def test_the_tail_of_a_long_log_is_its_end(log: Path) -> None:
    log.write_bytes(b"x" * 100_000 + b"MemoryError\n")
    tail = oom_evidence.read_tail(log)
    assert tail.endswith("xMemoryError\n")
    assert len(tail) == 65536
    assert oom_evidence.read_tail(log, most_bytes=12) == "MemoryError\n"


def test_the_tail_of_a_log_that_was_cut_is_its_end(log: Path) -> None:
    text = "".join(f"line {number:05}\n" for number in range(2000))
    log.write_text(text)
    cut_if_over(str(log), 10_000)
    with log.open("a") as file:
        file.write("MemoryError\n")
    assert oom_evidence.read_tail(log, most_bytes=4_000) == (text + "MemoryError\n")[-4_000:]
    assert (text + "MemoryError\n").endswith(oom_evidence.read_tail(log, most_bytes=20_000))


def test_a_log_with_invalid_utf_8_is_still_read(log: Path) -> None:
    log.write_bytes(b"\xff\xfe\nMemoryError\n")
    assert oom_evidence.read_tail(log).endswith("\nMemoryError\n")


def test_a_missing_log_has_an_empty_tail(log: Path) -> None:
    assert oom_evidence.read_tail(log) == ""
    log.mkdir()
    assert oom_evidence.read_tail(log) == ""


@pytest.mark.parametrize(
    ("arguments", "where", "asked_mb"),
    [
        (("-m", "gpuyard", "sim-job", "--vram", "30G"), ShortageKind.DEVICE, 30720.0),
        (("-c", "bytearray(1 << 62)"), ShortageKind.HOST, None),
        (("-c", "int('no number')"), None, None),
    ],
)
def test_a_real_out_of_memory_failure_is_recognised_from_its_log(
    log: Path, arguments: tuple[str, ...], where: ShortageKind | None, asked_mb: float | None
) -> None:
    environment = {**os.environ, "GPUYARD_SIMULATE": "1x24GB"}
    with log.open("wb") as output:
        done = subprocess.run([sys.executable, *arguments], stdout=output, stderr=output, env=environment, check=False)
    shortage = recognise(oom_evidence.read_tail(log))
    assert done.returncode != 0
    assert (shortage.where if shortage else None) is where
    assert (shortage.asked_mb if shortage else None) == asked_mb


def test_kills_are_counted_in_our_own_group(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/user.slice/session-3.scope\n")
    put(tmp_path, "sys/fs/cgroup/user.slice/memory.events", EVENTS.format(9))
    put(tmp_path, "sys/fs/cgroup/user.slice/session-3.scope/memory.events", EVENTS.format(4))
    assert oom_evidence.oom_kills(root=tmp_path) == 4


def test_kills_are_counted_in_another_process_group(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/a\n")
    put(tmp_path, "proc/17/cgroup", "0::/b\n")
    put(tmp_path, "sys/fs/cgroup/a/memory.events", EVENTS.format(1))
    put(tmp_path, "sys/fs/cgroup/b/memory.events", EVENTS.format(2))
    assert oom_evidence.oom_kills(17, tmp_path) == 2
    assert oom_evidence.oom_kills(18, tmp_path) is None


def test_a_group_without_a_memory_controller_is_counted_by_the_one_above(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/user.slice/session-3.scope\n")
    put(tmp_path, "sys/fs/cgroup/user.slice/session-3.scope/cgroup.procs", "")
    put(tmp_path, "sys/fs/cgroup/user.slice/memory.events", EVENTS.format(9))
    assert oom_evidence.oom_kills(root=tmp_path) == 9


@pytest.mark.parametrize("path", ["/", "/../other", "/docker/0123abcd"])
def test_in_a_container_the_mount_is_our_group(tmp_path: Path, path: str) -> None:
    put(tmp_path, "proc/self/cgroup", f"0::{path}\n")
    put(tmp_path, "sys/fs/cgroup/memory.events", EVENTS.format(5))
    assert oom_evidence.oom_kills(root=tmp_path) == 5


def test_kills_are_counted_under_version_1(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory,hugetlb:/jobs/17\n1:name=systemd:/x\n0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory/jobs/memory.oom_control", CONTROL.format(8))
    put(tmp_path, "sys/fs/cgroup/memory/jobs/17/memory.oom_control", CONTROL.format(3))
    assert oom_evidence.oom_kills(root=tmp_path) == 3


def test_in_a_container_the_mount_is_our_group_under_version_1(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/0123abcd\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.oom_control", CONTROL.format(6))
    assert oom_evidence.oom_kills(root=tmp_path) == 6


@pytest.mark.parametrize("text", ["", "oom 2\n", "oom_kill\n", "oom_kill many\n", "oom_kill -1\n", "\x00\xff"])
def test_a_count_that_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory.events", text)
    assert oom_evidence.oom_kills(root=tmp_path) is None


def test_without_a_cgroup_the_count_is_unknown(tmp_path: Path) -> None:
    assert oom_evidence.oom_kills(root=tmp_path) is None


def test_each_library_of_a_process_is_listed_once(tmp_path: Path) -> None:
    so = "/venv/lib/jaxlib/xla_extension.so"
    others = "7f02-7f03 rw-p 0 00:00 0\n7f03-7f04 r--p 0 08:01 6   /usr/bin/python3\n"
    put(tmp_path, "proc/17/maps", f"7f00-7f01 r-xp 0 08:01 5   {so}\n7f01-7f02 r--p 0 08:01 5   {so}\n{others}")
    assert oom_evidence.loaded_libraries(17, tmp_path) == so
    assert oom_evidence.loaded_libraries(18, tmp_path) == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc here")
def test_this_process_has_libraries_and_a_constant_count() -> None:
    assert ".so" in oom_evidence.loaded_libraries(os.getpid())
    assert oom_evidence.oom_kills() == oom_evidence.oom_kills(os.getpid())


def test_a_disk_that_hangs_does_not_hold_up_the_daemon(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once; then its folder is left alone, and others are read."""
    opened, goes_on, open_log = [], threading.Event(), job_logs.open_log

    def hang(path: Path) -> Any:
        opened.append(path)
        if path == log:
            goes_on.wait(90)
        return open_log(path)

    other = log.parent / "other" / "log"
    other.parent.mkdir()
    other.write_text("MemoryError\n")
    monkeypatch.setattr(oom_evidence, "open_log", hang)
    monkeypatch.setattr(oom_evidence, "_MOST_S", 0.05)
    monkeypatch.setattr(oom_evidence, "_hung", {})
    assert [oom_evidence.read_tail(log) for _ in range(3)] == ["", "", ""]
    monkeypatch.setattr(oom_evidence, "_MOST_S", 90.0)
    assert oom_evidence.read_tail(other) == "MemoryError\n"
    assert opened == [log, other]
    goes_on.set()
