"""A daemon notices once and for all that its folder is gone."""

import os
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import hold_daemon_lock
from gpuyard.daemon.loop_wakeups import HomeWatch


@pytest.mark.parametrize("harm", ["removed", "renamed", "replaced", "folder replaced"])
def test_a_lock_file_that_is_not_at_its_path_any_more_is_noticed(tmp_path: Path, harm: str) -> None:
    home = tmp_path / "home"
    lock = home / "daemon.lock"
    with hold_daemon_lock(lock) as is_in_place:
        assert is_in_place()
        if harm == "removed":
            lock.unlink()
        elif harm == "replaced":
            lock.unlink()
            lock.touch()
        else:
            os.rename(home, tmp_path / "away")
        if harm == "folder replaced":
            home.write_text("a file")
        assert not is_in_place()


def test_the_path_is_looked_at_once_a_second_and_a_lost_home_stays_lost() -> None:
    looks: list[float] = []
    now = [10.0]

    def has_home() -> bool:
        looks.append(now[0])
        return now[0] != 11.0

    watch = HomeWatch(has_home, "/home", lambda: now[0])
    for at, is_lost in ((10.0, False), (10.9, False), (11.0, True), (12.5, True)):
        now[0] = at
        assert watch.has_lost_home() is is_lost
    assert looks == [10.0, 11.0]
    assert watch.problem is not None
    assert "/home" in watch.problem
