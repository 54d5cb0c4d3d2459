"""Sessions of a real tmux, each marked with its owner; and a viewer outside of tmux."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.engines.session import tmux as module
from gpuyard.engines.session import viewer
from gpuyard.engines.session.tmux import Tmux, TmuxError
from tests.integration.engine_fixture import DEADLINE_S, let_go, wait_for
from tests.integration.session_fixture import OwnTmux, Tasks, a_tmux, some_tasks  # noqa: F401 - fixtures

pytestmark = pytest.mark.needs("tmux")

STAYS = ("sleep", "600")


@pytest.fixture(name="ours")
def tmux_under_test(tmux: OwnTmux) -> Tmux:
    return Tmux({**os.environ, **tmux.environment})


def test_without_a_server_there_are_no_sessions(ours: Tmux) -> None:
    assert ours.is_there()
    assert ours.owned_sessions("") == {}
    assert not ours.kill_session("name", "ws/1")


def test_sessions_are_found_by_the_beginning_of_their_owners_mark(ours: Tmux, tmux: OwnTmux) -> None:
    tmux("new-session", "-d", "-s", "mine", "cat")
    for name, owner in (("a", "ws/1"), ("b", "ws/2"), ("c", "other/1")):
        assert ours.open_session(name, owner, STAYS) == name
    assert ours.owned_sessions("ws/") == {"ws/1": ["a"], "ws/2": ["b"]}
    assert ours.owned_sessions("") == {"ws/1": ["a"], "ws/2": ["b"], "other/1": ["c"]}


def test_only_its_owner_closes_a_session(ours: Tmux, tmux: OwnTmux) -> None:
    tmux("new-session", "-d", "-s", "mine", "cat")
    ours.open_session("a", "ws/1", STAYS)
    ours.open_session("ab", "ws/1", STAYS)
    assert not ours.kill_session("a", "ws/2")
    assert not ours.kill_session("mine", "ws/1")
    assert not ours.kill_session("mine", "")
    assert ours.kill_session("a", "ws/1")
    assert sorted(tmux.sessions()) == ["ab", "mine"]


def test_simultaneous_requests_for_one_name_get_different_sessions(ours: Tmux, tmux: OwnTmux) -> None:
    """All of them try to start the tmux server."""
    names: list[str] = []
    owners = [f"ws/{number}" for number in range(5)]
    all_at_once = threading.Barrier(len(owners))

    def open_one(owner: str) -> None:
        all_at_once.wait(DEADLINE_S)
        names.append(ours.open_session("same", owner, STAYS))

    threads = [threading.Thread(target=open_one, args=(owner,)) for owner in owners]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE_S)
    assert sorted(names) == ["same", "same-2", "same-3", "same-4", "same-5"] == sorted(tmux.sessions())
    assert sorted(ours.owned_sessions("ws/")) == owners


def test_a_name_that_tmux_does_not_allow_is_mapped_and_returned(ours: Tmux, tmux: OwnTmux) -> None:
    assert ours.open_session("a.b:c #{pid}", "ws/1", STAYS) == "a_b_c___pid_"
    assert tmux.sessions() == ["a_b_c___pid_"]


def test_arguments_are_not_interpreted_by_a_shell_or_by_tmux(ours: Tmux, tmp_path: Path) -> None:
    arguments = ["$(id)", ";", "a;", "\\;", "#{pid}", "", "-x", "two words", "~"]
    script = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:])); input()"
    ours.open_session("a", "ws/1", [sys.executable, "-c", script, str(tmp_path / "arguments"), *arguments])
    wait_for(lambda: (tmp_path / "arguments").exists() and (tmp_path / "arguments").read_text(), "the program")
    assert (tmp_path / "arguments").read_text() == repr(arguments)


def test_a_session_opens_though_the_current_directory_was_removed(
    ours: Tmux, tmux: OwnTmux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ours.open_session("a", "ws/1", STAYS)
    assert tmux.sessions() == ["a"]


def test_a_hanging_tmux_times_out(tools: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tools("tmux", "import time; time.sleep(600)")
    monkeypatch.setattr(module, "_ANSWERS_WITHIN_S", 0.2)
    with pytest.raises(TmuxError, match="tmux did not answer within"):
        Tmux(os.environ).open_session("a", "ws/1", STAYS)


def test_a_tmux_that_cannot_be_executed_is_reported(tools: Callable[[str, str], Path]) -> None:
    tools("tmux", "#!/nowhere/at/all\n")
    with pytest.raises(TmuxError, match="tmux cannot be run: No such file or directory"):
        Tmux(os.environ).open_session("a", "ws/1", STAYS)


def test_a_missing_tmux_is_not_available(tmp_path: Path) -> None:
    nowhere = Tmux({"PATH": str(tmp_path)})
    assert not nowhere.is_there()
    with pytest.raises(TmuxError, match="tmux is not installed"):
        nowhere.owned_sessions("")


def test_a_viewer_of_a_finished_task_reports_it(tmp_path: Path) -> None:
    done = subprocess.run(viewer.command(str(tmp_path), "1.1"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "cannot show this task: No such file or directory\n")


def test_a_viewer_whose_terminal_closes_outside_of_tmux_does_not_end_the_task(tasks: Tasks, pipe: Path) -> None:
    script = f"echo up; read x < {pipe}; exit 3"
    task = tasks.start("/bin/sh", "-c", script, session="a", environment={"PATH": "/nowhere"})
    task.wait_for_output("up")
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"}
    command = ["setsid", "--ctty", *viewer.command(task.spec["sockets"], task.spec["key"])]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as viewing:
        os.close(theirs)
        output = b""
        while b"up" not in output:
            output += os.read(ours, 4096)
        os.close(ours)
        assert viewing.wait(DEADLINE_S) == 0
    let_go(pipe)
    assert task.wait() == 3
    assert task.record()["note"] == "no session: tmux is not installed"
