"""A workspace, or the default place of logs, that several users share."""

import os
from pathlib import Path

import pytest

from gpuyard.engines.session.task_files import open_log, owner_line
from gpuyard.errors import UserError
from gpuyard.recipes.workspace import workspace_files as files
from gpuyard.recipes.workspace.settings import LoadedSettings, load
from gpuyard.recipes.workspace.sweep import check
from tests.hostile.conftest import place  # noqa: F401 - fixtures are found where they are named
from tests.hostile.users import ANNE, BEN, act_as
from tests.unit.ledger import as_root

pytestmark = [as_root, pytest.mark.linux("how users are told apart is Linux's")]


def make_workspace(folder: Path, settings: str) -> LoadedSettings:
    """Make a workspace that every user may write to."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/a.yml").write_text("lr: 1\n")
    (folder / "train.py").write_text("")
    (folder / "scheduler_config.yml").write_text(f"task_name: T\nsessions: none\n{settings}")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)
    return load(folder)


def write_logs(folder: Path) -> tuple[str, str]:
    """Open the logs as `start` and the runner of a task do. Return the paths of the task's and of the scheduler's."""
    os.umask(0)
    loaded = load(folder)
    files.make_folders(folder, loaded.settings)
    scheduler_log = files.scheduler_log(loaded.settings, folder)
    assert scheduler_log is not None
    assert files.write_scheduler_log(scheduler_log, "a queued as job 1") is None
    wanted, other = files.task_logs(loaded.settings, folder, "a")
    assert wanted is not None
    likely = files.likely_log(loaded.settings, folder, "a")
    log, path = open_log(wanted, other, owner_line(files.workspace_tag(folder), str(folder)))
    os.close(log)
    assert path == likely
    return path, scheduler_log


def test_a_second_user_has_logs_of_their_own_in_the_same_place(place: Path) -> None:  # noqa: F811
    for name in ("anne", "ben"):
        make_workspace(place / name, f"log_dir: {place}\n")
    assert act_as(ANNE, write_logs, place / "anne") == (f"{place}/train_logs/a.log", f"{place}/T_scheduler.log")
    own = f"{place}/logs_{BEN}"
    assert act_as(BEN, write_logs, place / "ben") == (f"{own}/train_logs/a.log", f"{own}/T_scheduler.log")
    assert {path.stat().st_mode & 0o777 for path in place.rglob("train_logs")} == {0o700}
    assert act_as(ANNE, write_logs, place / "anne")[0] == f"{place}/train_logs/a.log"


def test_two_users_of_one_workspace_have_logs_of_their_own(place: Path) -> None:  # noqa: F811
    make_workspace(place / "w", "log_dir: logs\n")
    logs = place / "w/logs"
    assert act_as(ANNE, write_logs, place / "w") == (f"{logs}/train_logs/a.log", f"{logs}/T_scheduler.log")
    own = f"{logs}/logs_{BEN}"
    assert act_as(BEN, write_logs, place / "w") == (f"{own}/train_logs/a.log", f"{own}/T_scheduler.log")


def test_a_parser_in_settings_of_another_user_does_not_run(place: Path) -> None:  # noqa: F811
    loaded = make_workspace(place / "w", "parser: theirs:parse\npython_env: /bin/sh\n")
    (place / "w/theirs.py").write_text(f"open('{place}/trace', 'w')\ndef parse(config, path):\n    return []\n")
    os.chown(loaded.path, BEN, BEN)
    with pytest.raises(UserError, match=f"scheduler_config.yml belongs to {BEN}"):
        check(loaded)
    assert not (place / "trace").exists()
    os.chown(loaded.path, 0, 0)
    assert check(loaded) == (["a"], [])
    assert (place / "trace").exists()
