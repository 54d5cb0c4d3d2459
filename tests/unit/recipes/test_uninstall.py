"""All files of gpuyard are found and removed, and nothing else is touched."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import hold_daemon_lock
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.engines.common import job_logs
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Launch
from gpuyard.recipes import uninstall
from gpuyard.recipes.batch.plan import default_root
from gpuyard.recipes.uninstall import FoundFiles, KeptFile, find, measure, remove
from gpuyard.store.database import open_database
from gpuyard.system.files_outside_home import CLUSTER, LOG, SNAPSHOTS, WORKSPACE, record_outside
from tests.fakes.deep_folders import deep_folders
from tests.unit.ledger import as_root

pytestmark = pytest.mark.linux("the folders of a user by the conventions of Linux")

SOMEBODY = 65534
Tools = Callable[[str, str], Path]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a user; gpuyard uses the default directories of the platform there."""
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("GPUYARD_HOME", "GPUYARD_LOCK_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return home


@pytest.fixture
def state(user: Path) -> Path:
    folder = user / ".local/state/gpuyard"
    folder.mkdir(parents=True)
    return folder


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def files_in(folder: Path) -> list[str]:
    """Return all files below the folder, without folders."""
    found = (os.path.join(place, name) for place, folders, names in os.walk(folder) for name in [*folders, *names])
    return sorted(os.path.relpath(path, folder) for path in found if os.path.islink(path) or not os.path.isdir(path))


def removed() -> list[KeptFile]:
    return remove(find().places)


def stays(found: FoundFiles) -> dict[str, str]:
    return {each.path: each.why for each in found.kept}


# What is removed


def test_all_files_of_gpuyard_are_removed_and_the_home_is_as_before(user: Path, state: Path) -> None:
    for name in ("daemon.lock", "daemon.log", "web.token", "journal", "name", "queue.db.damaged-20260102T030405-wal"):
        write(state / name)
    open_database(state / "queue.db")[0].close()
    write(state / "logs" / job_logs.name_of(17, 2))
    write(Path(default_root("batch"), "run-000001/frames/1.png"))
    write(state / "keepers/log")
    write(state / "keepers/123.sock")
    write(state / "sessions/17.1.sock")
    write(state / "suspending/17.1.lock")
    write(state / "simulated/1-aa.share")
    launch = Launch(job_id=1, attempt=1, command=("true",), cwd="/", environment={})
    SubmissionDirs(state / "slurm").write("0123456789ab", [(launch, "/log")])
    write(user / ".config/gpuyard/config.toml", "")
    for name in ("a.lease", "b.ticket", ".c.lease"):
        write(user / ".gpu_locks" / name)
    (user / ".gpu_locks").chmod(0o700)

    found = find()
    assert found.kept == ()
    assert sum(measure(place)[0] for place in found.places) == len(files_in(user))
    assert remove(found.places) == []
    assert files_in(user) == []
    assert not state.exists()
    assert not (user / ".gpu_locks").exists()
    assert not (user / ".config/gpuyard").exists()
    assert find() == FoundFiles(places=(), kept=())


def test_gpuyard_home_is_removed_and_one_that_others_can_write_to_is_only_emptied(own_home: Path) -> None:
    for name in ("config.toml", "queue.db-wal", "daemon.log", "locks/a.lease", "logs/1.1.log"):
        write(own_home / name, "")
    (own_home / "locks").chmod(0o700)
    assert removed() == []
    assert not own_home.exists()
    write(own_home / "daemon.log")
    own_home.chmod(0o1777)
    assert removed() == []
    assert files_in(own_home) == []
    assert stat.S_IMODE(own_home.stat().st_mode) == 0o1777


def test_files_that_gpuyard_did_not_create_stay_and_are_named(state: Path) -> None:
    mine = [write(state / "notes.txt"), write(state / "logs/train.log"), write(state / "logs/1.1.log.bak")]
    write(state / "logs/1.1.log")
    found = find()
    assert stays(found) == dict.fromkeys(map(str, mine), "not created by gpuyard")
    assert remove(found.places) == []
    assert files_in(state) == ["logs/1.1.log.bak", "logs/train.log", "notes.txt"]


def test_logs_of_workspaces_are_removed_and_the_workspaces_stay(user: Path, state: Path, tmp_path: Path) -> None:
    workspace, log_dir = user / "sweep", tmp_path / "tmp"
    head = "# log of the workspace sweep-123456: /sweep\n"
    gone = [write(log_dir / "train_logs/a.log", head), write(log_dir / "T_scheduler.log", head)]
    kept = [write(workspace / "out/a_completed.txt"), write(log_dir / "train_logs/another.log", head)]
    kept += [write(log_dir / "train_logs/mine.log", "my own\n"), write(log_dir / "U_scheduler.log", head)]
    record_outside(state, WORKSPACE, [workspace])
    record_outside(state, LOG, [*gone, log_dir / "train_logs/mine.log", log_dir / "train_logs/never_written.log"])

    found = find()
    assert stays(found) == {
        str(workspace): "a workspace: its configs, results and markers are yours",
        str(log_dir / "train_logs/another.log"): "not created by gpuyard",
        str(log_dir / "train_logs/mine.log"): "not created by gpuyard",
    }
    assert remove(found.places) == []
    assert [path.exists() for path in (*kept, *gone)] == [True] * 4 + [False] * 2


def test_only_this_queues_part_of_shared_folders_is_removed(user: Path, state: Path, tmp_path: Path) -> None:
    shared, snapshots = tmp_path / "shared", tmp_path / "snapshots"
    record_outside(state, CLUSTER, [shared / "queue-0123abcd"])
    record_outside(state, SNAPSHOTS, [snapshots])
    write(shared / "queue-0123abcd/logs/1.1.log")
    write(shared / "queue-0123abcd/slurm/submissions/0123456789ab/submission.json")
    write(shared / "queue-ffffffff/logs/1.1.log")
    write(snapshots / "0123456789abcdef/tree/train.py")
    write(snapshots / "mine.txt")
    assert removed() == []
    assert files_in(shared) == ["queue-ffffffff/logs/1.1.log"]
    assert not (shared / "queue-0123abcd").exists()
    assert files_in(snapshots) == ["mine.txt"]


def test_systemd_units_and_shell_lines_are_removed_or_named(user: Path, tools: Tools) -> None:
    units = user / ".config/systemd/user"
    write(units / "gpuyard.service", "[Service]\nExecStart=/x/gpuyard daemon run\n")
    write(units / "other.service")
    (units / "default.target.wants").mkdir()
    (units / "default.target.wants/gpuyard.service").symlink_to(units / "gpuyard.service")
    write(user / ".config/fish/completions/gpuyard.fish", "set -lx _GPUYARD_COMPLETE fish_complete\n")
    write(user / ".bashrc", 'eval "$(gpuyard completion bash)"\n')
    tools("crontab", "print('@reboot /x/gpuyard daemon start')")

    found = find()
    assert stays(found) == {
        str(user / ".bashrc"): "has a line with `gpuyard completion`: remove it by hand",
        "crontab": "has a line that starts gpuyard: remove it with `crontab -e`",
    }
    assert remove(found.places) == []
    assert files_in(user) == [".bashrc", ".config/systemd/user/other.service"]
    unit = write(units / "gpuyard.service", "[Service]\nExecStart=/bin/true\n")
    assert removed() == []
    assert unit.exists(), "it is another program's"


# What is never touched


def test_symbolic_links_are_removed_as_links(state: Path, tmp_path: Path) -> None:
    treasure = write(tmp_path / "treasure/gold")
    logs_elsewhere = write(tmp_path / "disk/1.1.log")
    (state / "queue.db-wal").symlink_to(treasure)
    (state / "logs").symlink_to(logs_elsewhere.parent)
    run_folder = Path(default_root("b"))
    run_folder.mkdir(parents=True)
    (run_folder / "data").symlink_to(treasure.parent)
    found = find()
    assert f"a link to {logs_elsewhere.parent}, which stays" in [place.what for place in found.places]
    assert remove(found.places) == []
    assert treasure.exists()
    assert logs_elsewhere.exists()
    assert not state.exists()


def test_the_target_of_a_linked_state_folder_stays_and_is_named(user: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk/gpuyard"
    write(target / "daemon.log")
    link = user / ".local/state/gpuyard"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    found = find()
    assert stays(found) == {str(target): f"{link} is a link to it: remove it by hand"}
    assert remove(found.places) == []
    assert not os.path.lexists(link)
    assert (target / "daemon.log").exists()


def test_a_folder_that_becomes_a_link_after_it_was_listed_is_not_followed(state: Path, tmp_path: Path) -> None:
    write(state / "logs/1.1.log")
    found = find()
    (state / "logs").rename(tmp_path / "elsewhere")
    (state / "logs").symlink_to(tmp_path / "elsewhere")
    assert [each.path for each in remove(found.places)] == [str(state / "logs")]
    assert (tmp_path / "elsewhere/1.1.log").exists()


@as_root
def test_files_of_other_users_stay_with_their_folders(state: Path) -> None:
    theirs = write(Path(default_root("b"), "deep/theirs"))
    mine = write(theirs.with_name("mine"))
    theirs_in_logs = write(state / "logs/1.1.log")
    for path in (theirs, theirs_in_logs):
        os.chown(path, SOMEBODY, SOMEBODY)
    problems = removed()
    assert {each.path: each.why for each in problems} == dict.fromkeys(
        [str(theirs), str(theirs_in_logs)], f"belongs to user {SOMEBODY}"
    )
    assert (theirs.exists(), theirs_in_logs.exists(), mine.exists()) == (True, True, False)


@as_root
def test_in_a_shared_directory_only_the_users_own_leases_are_removed(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "leases"
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(shared))
    write(shared / "mine.lease")
    os.chown(write(shared / "theirs.lease"), SOMEBODY, SOMEBODY)
    shared.chmod(0o1777)
    assert removed() == []
    assert files_in(shared) == ["theirs.lease"]


@as_root
def test_the_state_folder_of_another_user_is_not_touched(state: Path) -> None:
    write(state / "daemon.log")
    os.chown(state, SOMEBODY, SOMEBODY)
    found = find()
    assert found.places == ()
    assert "belongs to another user" in stays(found)[str(state)]


@pytest.mark.parametrize("variable", ["GPUYARD_HOME", "GPUYARD_LOCK_DIR"])
@pytest.mark.parametrize("place", ["", "..", "../..", "/", "../link"])
def test_the_home_folder_and_what_leads_to_it_are_refused(
    user: Path, monkeypatch: pytest.MonkeyPatch, variable: str, place: str
) -> None:
    write(user / "daemon.log")
    (user.parent / "link").symlink_to(user)
    monkeypatch.setenv(variable, os.path.normpath(user / place))
    with pytest.raises(UserError, match="is your home folder or contains it"):
        find()
    assert (user / "daemon.log").exists()


def test_folders_nested_1500_deep_are_removed(state: Path) -> None:
    batch = Path(default_root("b"))
    batch.mkdir(parents=True)
    with deep_folders(batch):
        assert not removed()
        assert not state.exists()


# What prevents it


def test_an_unreadable_database_stops_the_removal_and_is_named(state: Path) -> None:
    path = write(state / "queue.db", "no database at all" * 100)
    with pytest.raises(EnvironmentFault, match="it is unknown whether jobs run or wait") as raised:
        uninstall.uninstall()
    assert str(path) in str(raised.value.hint)
    assert path.exists()


def test_a_daemon_restarted_meanwhile_keeps_its_files(state: Path) -> None:
    log = write(state / "daemon.log")
    with (
        hold_daemon_lock(state / "daemon.lock"),
        pytest.raises(
            EnvironmentFault, match=f"the daemon already runs .pid {os.getpid()}., because it was started again"
        ),
    ):
        uninstall.uninstall()
    assert log.exists()
    assert uninstall.uninstall() == []
    assert not state.exists()


def test_without_files_nothing_is_created(user: Path) -> None:
    assert uninstall.find_blockers() == []
    assert uninstall.uninstall() == []
    assert list(user.iterdir()) == []
