"""Which logs are removed: those of jobs that are gone, and the oldest beyond the limit, never of unfinished jobs."""

import os
from pathlib import Path

import pytest

from gpuyard.daemon import retention as log_files
from gpuyard.daemon.retention import LogFile, list_logs, remove_logs, surplus
from gpuyard.errors import EnvironmentFault


def log(job_id: int, size: int, at: float = 0.0) -> LogFile:
    return LogFile(f"/logs/{job_id}.1.log", job_id, size, at)


def ids(logs: list[LogFile]) -> list[int]:
    return [each.job_id for each in logs]


def test_the_oldest_logs_go_until_the_rest_is_within_the_limit_and_those_of_unfinished_jobs_stay() -> None:
    logs = [log(4, 50), log(1, 50), log(3, 50), log(2, 50)]
    assert ids(surplus(logs, (), (), 110)) == [4, 1]
    assert ids(surplus(logs, (), (), 100)) == [4, 1]
    assert ids(surplus(logs, (), (), 200)) == []
    assert ids(surplus(logs, (), (), None)) == []
    logs = [log(1, 500), log(2, 50), log(3, 50)]
    assert ids(surplus(logs, {1}, (), 100)) == [2, 3]
    assert ids(surplus(logs, {1}, {1, 3}, None)) == [3]
    assert ids(surplus([log(1, 50), log(2, 50), log(3, 50)], (), {3}, 100)) == [3]


def test_only_files_that_are_named_as_logs_are_listed(tmp_path: Path) -> None:
    for name in ("17.1.log", "9.12.log", "notes.log", "17.log", "daemon.log", "17.1.log~", "-1.1.log"):
        (tmp_path / name).write_text("text")
    (tmp_path / "18.1.log").symlink_to(tmp_path / "notes.log")
    (tmp_path / "19.1.log").mkdir()
    os.utime(tmp_path / "9.12.log", (5.0, 5.0))
    found = list_logs([tmp_path, tmp_path / "absent"])
    assert [(each.job_id, each.size) for each in found] == [(9, 4), (17, 4)]
    removed, problem = remove_logs([*found, LogFile(str(tmp_path / "20.1.log"), 20, 1, 1.0)])
    assert (removed, problem) == (found, None)
    assert not (tmp_path / "17.1.log").exists()
    assert (tmp_path / "notes.log").read_text() == "text"


def test_a_log_that_is_removed_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.1.log").touch()

    def remove_the_others(number: int) -> None:
        for path in tmp_path.iterdir() if number == 0 else ():
            path.unlink()

    monkeypatch.setattr(log_files, "_pause", remove_the_others)
    assert len(list_logs([tmp_path])) == 1


def test_what_was_cut_out_does_not_count_and_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    with (tmp_path / "17.1.log").open("wb") as file:
        file.truncate(1 << 30)
    assert list_logs([tmp_path])[0].size < 1 << 20
    (tmp_path / "logs").symlink_to("logs")
    with pytest.raises(EnvironmentFault, match="logs cannot be read: "):
        list_logs([tmp_path / "logs"])


def test_a_log_that_cannot_be_removed_is_named_and_the_others_go(tmp_path: Path) -> None:
    stuck = tmp_path / "1.1.log"
    stuck.mkdir()  # a file on a read-only file system fails alike
    (tmp_path / "2.1.log").touch()
    logs = [LogFile(str(tmp_path / f"{number}.1.log"), number, 1, 1.0) for number in (1, 2)]
    removed, problem = remove_logs(logs)
    assert ids(removed) == [2]
    assert problem is not None
    assert problem.startswith(f"{stuck} cannot be removed: ")
