"""Attacks by folders and files that another user has prepared."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from gpuyard.client.autostart import start_daemon
from gpuyard.config import load_config
from gpuyard.daemon.web.open_page import make_token, read_token
from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.recipes.uninstall import find
from gpuyard.store.database import open_database
from gpuyard.system import user_directories as local_folder
from gpuyard.system.files_outside_home import LOG, MANIFEST
from gpuyard.system.private_files import PrivateFileError
from tests.fakes.queue_command import run
from tests.fakes.site import ProcessSite
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as
from tests.integration.engine_fixture import launch_of
from tests.integration.queue_fixture import Daemon

PRECIOUS = "echo my own shell\n"


def write(path: str, content: str, mode: int = 0o644) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)
    os.chmod(path, mode)


@pytest.fixture
def profile(place: Path) -> Path:
    """A file of the victim that a shell runs."""
    path = place / ".profile"
    path.write_text(PRECIOUS)
    path.chmod(0o644)
    return path


@pytest.fixture
def prepared(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPUYARD_HOME is a folder that Ben made first."""
    folder = place / "prepared"
    act_as(BEN, os.mkdir, str(folder), 0o755)
    monkeypatch.setenv("GPUYARD_HOME", str(folder))
    return folder


@pytest.fixture
def own(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPUYARD_HOME is the victim's own folder. Everyone can write to it for now."""
    folder = place / "own"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("GPUYARD_HOME", str(folder))
    return folder


@attack(
    "make `GPUYARD_HOME` first, with `daemon.log` as a link to the victim's `.profile`",
    now="refused",
)
def test_log_through_a_link_in_another_users_folder(prepared: Path, profile: Path) -> None:
    act_as(BEN, os.symlink, str(profile), str(prepared / "daemon.log"))
    act_as(BEN, write, str(prepared / "config.toml"), '[queue]\n"`touch /tmp/owned`" = 1\n')
    done = run("submit", "--", "true")
    assert done.returncode == 1
    assert f"belongs to the user {BEN}, and not to you" in done.stderr
    assert profile.read_text() == PRECIOUS


@attack(
    "leave `daemon.log` as a link in a folder that was once writable for all",
    now="refused",
)
def test_log_through_a_link(own: Path, profile: Path) -> None:
    act_as(BEN, os.symlink, str(profile), str(own / "daemon.log"))
    own.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"daemon\.log cannot be written: it is a symbolic link"):
        start_daemon(["/bin/false"])
    assert profile.read_text() == PRECIOUS


@attack("leave `daemon.log` as a hard link to a file of the victim", now="refused")
def test_log_through_a_hard_link(own: Path, profile: Path) -> None:
    os.link(profile, own / "daemon.log")  # as Ben where the kernel lets him
    own.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="hard link"):
        start_daemon(["/bin/false"])
    assert profile.read_text() == PRECIOUS


@attack("leave `daemon.log` as a file that the attacker can read", now="refused")
def test_log_in_another_users_file(own: Path) -> None:
    act_as(BEN, write, str(own / "daemon.log"), "", 0o666)
    own.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="it belongs to another user"):
        start_daemon(["/bin/false"])


@attack("write a `config.toml` into a folder made first", now="refused")
def test_configuration_in_another_users_folder(prepared: Path) -> None:
    act_as(BEN, write, str(prepared / "config.toml"), "[notify]\nto = ['json://ben.example']\n")
    with pytest.raises(UserError, match=r"the configuration is not read: .* belongs to"):
        load_config()


@attack("leave a `config.toml` in the victim's folder", now="refused")
def test_configuration_of_another_user(own: Path) -> None:
    act_as(BEN, write, str(own / "config.toml"), "[notify]\nto = ['json://ben.example']\n")
    own.chmod(0o755)
    with pytest.raises(UserError, match=f"belongs to the user {BEN}") as caught:
        load_config()
    assert "remove it" in (caught.value.hint or "")


@attack("change a `config.toml` that everyone can write to", now="refused")
def test_configuration_that_all_can_write(own: Path) -> None:
    own.chmod(0o755)
    write(str(own / "config.toml"), "", 0o666)
    act_as(BEN, write_at_end, str(own / "config.toml"), "[notify]\nto = ['json://ben.example']\n")
    with pytest.raises(UserError, match="other users can write to") as caught:
        load_config()
    assert f"`chmod go-w {own}/config.toml`" in (caught.value.hint or "")


def write_at_end(path: str, content: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(content)


@attack("put a link to another configuration on the way to it", now="refused")
def test_configuration_through_a_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as(BEN, os.mkdir, str(place / "theirs"), 0o755)
    act_as(BEN, write, str(place / "theirs/config.toml"), "[queue]\ncpu_jobs = 1\n")
    act_as(BEN, os.symlink, str(place / "theirs"), str(place / "link"))
    monkeypatch.setenv("GPUYARD_HOME", str(place / "link"))
    with pytest.raises(UserError, match="the symbolic link"):
        load_config()


def failed_start() -> str:
    daemon = Daemon()
    if daemon.serves():
        daemon.kill()
    else:
        daemon.wait()
    return daemon.log


@attack("leave a `queue.db` with jobs in the victim's folder", now="refused")
def test_database_of_another_user(own: Path, place: Path) -> None:
    open_database(place / "queue.db")[0].close()
    os.chown(place / "queue.db", BEN, BEN)
    (place / "queue.db").rename(own / "queue.db")
    own.chmod(0o755)
    assert f"queue.db belongs to the user {BEN}, in a folder of yours (remove it, or set GPUYARD_HOME" in failed_start()


@attack("write to a state folder that is writable for all", now="refused")
def test_state_folder_that_all_can_write(own: Path) -> None:
    with pytest.raises(EnvironmentFault, match="other users can write to") as caught:
        start_daemon(["/bin/false"])
    assert f"`chmod go-w {own}`" in (caught.value.hint or "")
    assert os.listdir(own) == []


@attack("rename the victim's state folder, in a folder that all can write to", now="refused")
def test_state_folder_in_a_folder_that_all_can_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    monkeypatch.setenv("GPUYARD_HOME", str(place / "open/home"))
    with pytest.raises(EnvironmentFault, match="and so replace") as caught:
        start_daemon(["/bin/false"])
    assert f"`chmod +t {place}/open`" in (caught.value.hint or "")
    assert os.listdir(place / "open") == []


@attack("make `logs` a link to a folder of the victim", now="refused")
def test_logs_behind_a_link(own: Path, place: Path) -> None:
    (place / "public").mkdir()
    (place / "public").chmod(0o755)
    act_as(BEN, os.symlink, str(place / "public"), str(own / "logs"))
    own.chmod(0o755)
    with pytest.raises(PrivateFileError, match="the symbolic link"):
        LocalEngine(own)
    assert stat.S_IMODE((place / "public").stat().st_mode) == 0o755


@attack("make `journal` a link to a file of the victim", now="refused")
def test_journal_behind_a_link(own: Path, profile: Path) -> None:
    act_as(BEN, os.symlink, str(profile), str(own / "journal"))
    own.chmod(0o755)
    with pytest.raises(PrivateFileError, match="journal cannot be written: it is a symbolic link"):
        LocalEngine(own)
    assert stat.S_IMODE(profile.stat().st_mode) == 0o644


@attack("leave a `web.token` that the attacker knows", now="ignored")
def test_token_of_another_user(own: Path) -> None:
    token = make_token(own / "web.token")
    os.chown(own / "web.token", BEN, BEN)
    own.chmod(0o755)
    assert read_token(own / "web.token") != token
    assert (own / "web.token").stat().st_uid == 0


@attack(
    "leave an `outside-files` that names files of the victim as logs, and wait for `gpuyard uninstall`",
    now="refused",
)
def test_uninstall_with_a_manifest_of_another_user(
    own: Path, place: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(place / "ledger"))
    (own / MANIFEST).write_text(json.dumps([LOG, str(profile)]) + "\n")
    os.chown(own / MANIFEST, BEN, BEN)
    own.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=MANIFEST):
        find()
    assert profile.exists()


# Clusters


@attack("own the exchange folder of a Slurm or Ray cluster", now="refused")
def test_cluster_folder_of_another_user(place: Path) -> None:
    act_as(BEN, os.mkdir, str(place / "shared"), 0o777)
    engine = ClusterEngine(ProcessSite(), place / "shared" / "queue", lambda: None)
    with pytest.raises(EnvironmentFault, match=f"which belongs to the user {BEN}") as caught:
        engine.prepare(launch_of(1, "true"), None)
    assert "name another as `folder` of the engine in config.toml" in (caught.value.hint or "")


@attack("write to the exchange folder of a cluster", now="refused")
def test_cluster_folder_that_all_can_write(place: Path) -> None:
    (place / "shared").mkdir()
    (place / "shared").chmod(0o777)
    engine = ClusterEngine(ProcessSite(), place / "shared" / "queue", lambda: None)
    with pytest.raises(EnvironmentFault, match="other users can write to"):
        engine.prepare(launch_of(1, "true"), None)
    assert os.listdir(place / "shared") == []


@attack("open the exchange folder to all after the first job", now="refused")
def test_cluster_folder_that_is_opened_later(place: Path) -> None:
    engine = ClusterEngine(ProcessSite(), place / "own", lambda: None)
    engine.prepare(launch_of(1, "true"), None)
    (place / "own").chmod(0o777)
    with pytest.raises(EnvironmentFault, match="other users can write to"):
        engine.prepare(launch_of(2, "true"), None)


@attack("make the folder of submissions a link", now="refused")
def test_submissions_behind_a_link(place: Path) -> None:
    act_as(BEN, os.mkdir, str(place / "theirs"), 0o777)
    (place / "own").mkdir()
    (place / "own").chmod(0o777)
    act_as(BEN, os.symlink, str(place / "theirs"), str(place / "own/submissions"))
    (place / "own").chmod(0o755)
    with pytest.raises(GpuyardError, match="the symbolic link"):
        SubmissionDirs(place / "own").write("t", [(launch_of(1, "true"), str(place / "log"))])
    assert os.listdir(place / "theirs") == []


@attack(
    "change a submission on the shared disk, after the job is in Slurm's queue",
    now="refused",
)
def test_changed_submission_on_a_node(place: Path) -> None:
    submissions = SubmissionDirs(place / "own")
    submissions.write("t", [(launch_of(1, "true"), str(place / "log"))])
    command = [*node_supervisor.command(submissions.path("t"), submissions.digest("t")), "0"]
    path = Path(submissions.path("t")) / "submission.json"
    path.write_text(path.read_text().replace('"true"', f'"/usr/bin/touch", "{place}/owned"'))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "another process has changed submission.json" in done.stderr
    assert not (place / "owned").exists()
    assert os.listdir(submissions.path("t")) == ["submission.json"]


@attack("make the log of a job a link to a file of the victim", now="refused")
def test_log_of_a_job_behind_a_link(place: Path, profile: Path) -> None:
    submissions = SubmissionDirs(place / "own")
    (place / "log").symlink_to(profile)
    submissions.write("t", [(launch_of(1, "echo", "owned"), str(place / "log"))])
    command = [*node_supervisor.command(submissions.path("t"), submissions.digest("t")), "0"]
    assert subprocess.run(command, check=False).returncode != 0
    assert profile.read_text() == PRECIOUS


@pytest.fixture
def on_network_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A state folder on a network disk, and the folder on a local disk that takes its place, in a stand-in of /var/tmp
    in which every user can create files."""
    base, mounts = place / "var-tmp", place / "mounts"
    base.mkdir()
    base.chmod(0o1777)
    mounts.write_text(f"1 1 4095:1 / / rw - ext4 x rw\n2 1 4095:2 / {place}/home rw - nfs4 server:/home rw\n")
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(mounts))
    monkeypatch.setattr(local_folder, "_BASES", (f"{base}/gpuyard-{{uid}}",))
    monkeypatch.setattr(local_folder, "_found", {})
    return place / "home" / "gpuyard", base / f"gpuyard-{os.geteuid()}"


@attack(
    "make the folder in /var/tmp that takes the place of a home on a network disk first",
    now="refused: the victim's commands name the folder and its owner, and how to use another",
)
def test_folder_in_place_of_a_network_disk(on_network_disk: tuple[Path, Path]) -> None:
    home, instead = on_network_disk
    act_as(BEN, os.mkdir, str(instead), 0o777)
    with pytest.raises(EnvironmentFault, match=f"{instead} belongs to the user {BEN}") as caught:
        local_folder.find_local_folder(str(home))
    assert caught.value.hint == "set XDG_STATE_HOME to a folder on a local disk that is yours alone"
    assert os.listdir(instead) == []


@attack(
    "make that folder a link to another folder of the victim",
    now="refused",
)
def test_link_in_place_of_a_network_disk(on_network_disk: tuple[Path, Path], profile: Path) -> None:
    home, instead = on_network_disk
    act_as(BEN, os.symlink, str(profile.parent), str(instead))
    before = sorted(os.listdir(profile.parent))
    with pytest.raises(EnvironmentFault, match=f"the symbolic link {instead} belongs to the user {BEN}"):
        local_folder.find_local_folder(str(home))
    assert sorted(os.listdir(profile.parent)) == before
