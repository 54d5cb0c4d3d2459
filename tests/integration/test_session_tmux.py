"""A task in a session of a real tmux: its screen and input, and the task when tmux ends."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.integration.engine_fixture import let_go, wait_for, wait_until_gone
from tests.integration.session_fixture import OwnTmux, Task, Tasks, a_tmux, some_tasks  # noqa: F401 - fixtures
from tests.integration.terminal import Terminal
from tests.scale import size

pytestmark = pytest.mark.needs("tmux")
unmeasured = pytest.mark.usefixtures("unmeasured")

NAME = "TASK_exp1_gpu0"
WAITS = "echo up; read x; echo got $x; exit 3"


def shown(tasks: Tasks, script: str = WAITS, **other: object) -> Task:
    """Start a task and wait until its session shows it."""
    task = tasks.sh(script, **{"session": NAME, **other})
    wait_for(lambda: Path(task.spec["record"]).exists() and task.record()["session"], "the session")
    tasks.tmux.wait_to_see(task.record()["session"], "up")
    return task


@contextlib.contextmanager
def attached(tmux: OwnTmux, name: str = NAME) -> Iterator[Terminal]:
    terminal = Terminal(["tmux", "-u", "attach-session", "-t", f"={name}"], {**tmux.environment, "TMUX": ""})
    yield terminal
    terminal.close()


# Screen and input


@unmeasured
def test_a_session_shows_output_of_the_task_and_passes_on_input(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks)
    tmux("send-keys", "-t", f"={NAME}:", "hällo", "Enter")
    assert task.wait() == 3
    tmux.wait_to_see(NAME, "got hällo")
    assert "got hällo" in task.output()
    assert task.record()["session"] == NAME


def test_input_before_the_program_reads_is_buffered(tasks: Tasks, tmux: OwnTmux, pipe: Path) -> None:
    task = shown(tasks, f"stty raw -echo; echo up; read x < {pipe}; head -c 20000 | tr -d x | wc -c")
    for _ in range(4):  # tmux accepts no more at once
        tmux("send-keys", "-l", "-t", f"={NAME}:", 2_500 * "xy")
    let_go(pipe)
    assert task.wait() == 0
    assert "10000" in task.output()


@unmeasured
def test_a_session_has_a_long_scrollback(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks, "echo up; seq -f 'line %g.' 6000; read x")
    tmux.wait_to_see(NAME, "line 6000.")
    assert [f"line {number}." for number in range(1, 6001)] == tmux.screen(NAME).split("\n")[2:6002]
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    assert task.wait() == 0


@unmeasured
def test_the_last_screen_stays_with_the_result(tasks: Tasks, tmux: OwnTmux) -> None:
    assert tasks.sh("echo the last words; exit 4", session=NAME).wait() == 4
    tmux.wait_for_dead_pane(NAME)
    tmux.wait_to_see(NAME, "the last words\n\n[exp1 failed, status 4, after ")


def test_a_session_is_closed_after_completion_if_configured(tasks: Tasks, tmux: OwnTmux) -> None:
    tmux("new-session", "-d", "-s", "mine", "cat")
    assert tasks.sh("true", session=NAME, closes_session=True).wait() == 0
    assert tmux.sessions() == ["mine"]


def test_sessions_of_earlier_attempts_are_closed_too(tasks: Tasks, tmux: OwnTmux) -> None:
    tmux("new-session", "-d", "-s", "mine", "cat")
    tasks.sh("exit 1", config="exp2", session="TASK_exp2_gpu0", owner="tag/another", closes_session=True).wait()
    for place in ("gpu0", "gpu1"):
        assert tasks.sh("exit 1", session=f"TASK_exp1_{place}", closes_session=True).wait() == 1
    assert tmux.sessions() == ["TASK_exp1_gpu0", "TASK_exp1_gpu1", "TASK_exp2_gpu0", "mine"]
    assert tasks.sh("true", session="TASK_exp1_gpu2", closes_session=True).wait() == 0
    assert tmux.sessions() == ["TASK_exp2_gpu0", "mine"]


def test_sessions_are_closed_if_the_marker_exists_already(tasks: Tasks, tmux: OwnTmux) -> None:
    task = tasks.sh("exit 1", session=NAME, closes_session=True)
    assert task.wait() == 1
    task.marker.parent.mkdir()
    task.marker.touch()
    assert tasks.sh("exit 1", session="TASK_exp1_gpu1", closes_session=True).wait() == 0
    assert tmux.sessions() == []


def test_a_session_is_not_closed_after_a_failure(tasks: Tasks, tmux: OwnTmux) -> None:
    assert tasks.sh("echo why; exit 1", session=NAME, closes_session=True).wait() == 1
    tmux.wait_to_see(NAME, "why")


@unmeasured
def test_the_size_of_the_window_reaches_the_program(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks, "trap 'stty size' WINCH; echo up; while :; do read x && exit; done")
    tmux("resize-window", "-t", f"={NAME}:", "-x", "111", "-y", "33")
    task.wait_for_output("33 111")
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    assert task.wait() == 0


@unmeasured
def test_an_attached_terminal_shows_the_next_attempt(tasks: Tasks, tmux: OwnTmux) -> None:
    shown(tasks, "echo up; read x; exit 1")
    with attached(tmux) as terminal:
        terminal.read_until("up")
        terminal.type("\r")
        terminal.read_until("[exp1 failed, status 1")
        tmux.wait_for_dead_pane(NAME)
        second = tasks.sh("echo the second; read x; echo got $x; exit 2", session=NAME, attempt=2, key="1.2")
        terminal.read_until("the second")
        terminal.type("it\r")
        terminal.read_until("got it")
        assert second.wait() == 2
    assert tmux.sessions() == [NAME]
    assert second.record()["session"] == NAME


# Sessions of others


@unmeasured
def test_a_session_without_its_task_is_used_again(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks)
    os.kill(task.runner, signal.SIGKILL)
    tmux.wait_for_dead_pane(NAME)
    assert "this task was killed" in tmux.screen(NAME)
    again = tasks.sh("echo again; read x", session=NAME)
    tmux.wait_to_see(NAME, "again")
    assert again.record()["session"] == NAME
    assert tmux.sessions() == [NAME]


def test_a_users_program_in_a_task_session_is_not_killed_for_the_next_task(tasks: Tasks, tmux: OwnTmux) -> None:
    shown(tasks, "echo up; read x")
    tmux("split-window", "-t", f"={NAME}:", "echo by hand; exec cat")
    first = tmux("list-panes", "-t", f"={NAME}:", "-F", "#{pane_pid}").split()
    again = tasks.sh("echo again; read x", session=NAME)
    tmux.wait_to_see(NAME, "again")
    assert again.record()["session"] == NAME
    assert set(first) < set(tmux("list-panes", "-s", "-t", f"={NAME}", "-F", "#{pane_pid}").split())


@unmeasured
@pytest.mark.parametrize("name", ["-a b'\"größe;", "a:b.c$(touch owned)", "#(touch owned)実験 #{pid}"])
def test_hostile_session_names_are_passed_unchanged(tasks: Tasks, tmux: OwnTmux, name: str) -> None:
    sockets = tasks.folder / f"{name};"
    sockets.mkdir()
    task = shown(tasks, session=name, sockets=str(sockets), config=name)
    session = task.record()["session"]
    assert tmux.sessions() == [session]
    tmux("send-keys", "-t", f"={session}:", "Enter")
    assert task.wait() == 3
    tmux.wait_to_see(session, f"[{name} failed, status 3")
    assert not list(tasks.folder.rglob("owned"))


# The tmux server


@unmeasured
def test_a_tmux_server_started_for_a_task_inherits_nothing_from_it(tasks: Tasks, tmux: OwnTmux) -> None:
    lease = os.open(tasks.folder / "lease", os.O_RDWR | os.O_CREAT)
    own = {
        "CUDA_VISIBLE_DEVICES": "0",
        "MY_DEVICES": "0",
        "GPUYARD_QUEUE": "/queue",
        "TMUX": "/nowhere,1,0",
        "KEPT": "1",
    }
    task = shown(tasks, environment=own, variable="MY_DEVICES", lease=lease)
    assert os.readlink(f"/proc/{task.program()}/fd/8") == str(tasks.folder / "lease")
    inherited = tmux("show-environment", "-g").splitlines()
    assert "KEPT=1" in inherited
    assert not [line for line in inherited if line.startswith(("GPUYARD_", "CUDA_", "MY_DEVICES", "TMUX="))]
    for pid in (tmux.server(), tmux.viewer(NAME)):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert not [each for each in environment if each.startswith((b"GPUYARD_", b"CUDA_", b"MY_DEVICES"))]
        descriptors = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        assert not [each for each in descriptors if each.startswith(str(tasks.folder))]
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
    os.close(lease)


@unmeasured
def test_settings_in_a_users_tmux_conf_do_not_break_sessions(tasks: Tasks, tmux: OwnTmux, tmp_path: Path) -> None:
    settings = (
        "set -g default-command false\nset -g destroy-unattached on\nset -g history-limit 5\nset -g base-index 7\n"
        "set -g pane-base-index 3\nset -g renumber-windows on\nset -g remain-on-exit off\nset -g status off\n"
    )
    (tmp_path / ".tmux.conf").write_text(settings)
    task = shown(tasks, "echo up; seq -f 'line %g.' 500; exit 3")
    assert task.wait() == 3
    tmux.wait_to_see(NAME, "[exp1 failed, status 3")
    assert "line 1.\n" in tmux.screen(NAME)
    assert tmux("show-options", "-g", "history-limit") == "history-limit 5"


def test_new_windows_of_the_session_are_in_the_tasks_directory(tasks: Tasks, tmux: OwnTmux) -> None:
    shown(tasks)
    assert tmux("display-message", "-p", "-t", f"={NAME}:", "#{session_path}") == f"{tasks.folder}/work"


# When the session or tmux ends


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("command", ["kill-session", "kill-pane"])
def test_closing_a_session_ends_the_task(tasks: Tasks, tmux: OwnTmux, command: str, is_last: bool) -> None:
    """Also the last session, with which tmux itself ends."""
    task = shown(tasks)
    if not is_last:
        tmux("new-session", "-d", "-s", "mine", "cat")
    server = tmux.server()
    tmux(command, "-t", f"={NAME}:")
    assert task.wait() == 129
    assert (task.record()["result"], task.record()["status"]) == ("failed", 129)
    assert "its session was closed" in task.record()["note"]
    if is_last:
        wait_until_gone(server, "tmux")
    assert tmux.sessions() == ([] if is_last else ["mine"])


def test_closing_a_session_before_the_task_starts_ends_the_task(tasks: Tasks, tmux: OwnTmux) -> None:
    task = tasks.sh("echo ran", session=NAME, delay_s=600.0)
    tmux.wait_to_see(NAME, "--- exp1, job 1, attempt 1, on gpu0, ")
    tmux("kill-session", "-t", f"={NAME}")
    assert task.wait() == 129
    assert task.record()["result"] == "failed"
    assert "ran" not in task.output()


def test_a_program_that_writes_its_marker_when_its_session_closes_is_completed(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks, "trap 'mkdir ../out; touch ../out/exp1_completed.txt; exit 1' HUP; echo up; read x")
    tmux("kill-session", "-t", f"={NAME}")
    assert task.wait() == 0
    assert (task.record()["result"], task.record()["status"]) == ("completed", 1)


@unmeasured
@pytest.mark.parametrize("how", ["kill -9", "kill", "kill-server"])
def test_a_task_survives_its_tmux_and_a_new_session_shows_it(tasks: Tasks, tmux: OwnTmux, how: str) -> None:
    task = shown(tasks)
    server = tmux.server()
    if how == "kill-server":
        tmux("kill-server")
    else:
        os.kill(server, signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    wait_until_gone(server, "tmux")
    tmux.wait_to_see(NAME, "up")
    assert tmux.server() != server
    tmux("send-keys", "-t", f"={NAME}:", "again", "Enter")
    assert task.wait() == 3
    assert "got again" in task.output()
    tmux.wait_to_see(NAME, "[exp1 failed, status 3")
    assert task.record()["note"] is None


@unmeasured
def test_many_tasks_survive_their_tmux(tasks: Tasks, tmux: OwnTmux, pipe: Path) -> None:
    """All tasks start a new tmux server at once; exactly one server results."""
    names = [f"TASK_exp{number}_gpu0" for number in range(4)]
    for number in range(4):
        os.mkfifo(f"{pipe}.{number}")
    each = [
        shown(tasks, f"echo up {number}; read x < {pipe}.{number}", session=name, config=f"exp{number}", owner=name)
        for number, name in enumerate(names)
    ]
    os.kill(tmux.server(), signal.SIGKILL)
    wait_for(lambda: sorted(tmux.sessions()) == names, "new sessions")
    for number, name in enumerate(names):
        tmux.wait_to_see(name, f"up {number}")
        let_go(Path(f"{pipe}.{number}"))
    assert [task.wait() for task in each] == [0] * 4
    assert all(task.marker.exists() for task in each)


@unmeasured
def test_a_killed_viewer_is_replaced_in_its_session(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks)
    viewer = tmux.viewer(NAME)
    with attached(tmux) as terminal:
        terminal.read_until("up")
        os.kill(viewer, signal.SIGKILL)
        wait_for(lambda: tmux.viewer(NAME) != viewer, "another viewer")
        tmux.wait_to_see(NAME, "up")
        terminal.type("it\r")
        terminal.read_until("got it")
    assert task.wait() == 3
    assert tmux.sessions() == [NAME]


@unmeasured
def test_after_repeated_losses_of_its_session_a_task_runs_without_one(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks)
    for _ in range(4):
        wait_for(tmux.sessions, "a session")
        tmux.wait_to_see(NAME, "up")
        viewer = tmux.viewer(NAME)
        os.kill(tmux.server(), signal.SIGKILL)
        wait_until_gone(viewer, "the viewer")
    assert not task.is_over()
    os.kill(task.program(), signal.SIGKILL)
    assert task.wait() == 137
    assert tmux.sessions() == []


@pytest.mark.full
def test_a_session_whose_viewer_never_connects_is_opened_again(tasks: Tasks, tmux: OwnTmux, tmp_path: Path) -> None:
    """As if tmux died before the viewer connects: the first session is never created."""
    (tmp_path / "bin").mkdir()
    write_executable(
        tmp_path / "bin/tmux",
        f"#!/bin/sh\ncase $* in *new-session*) mkdir '{tmp_path}/once' 2>/dev/null && exit 0 ;; esac\n"
        f'exec {shutil.which("tmux")} "$@"\n',
    )
    task = tasks.sh(
        "echo up; read x; exit 3", session=NAME, environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    )
    tmux.wait_to_see(NAME, "up")
    tmux("send-keys", "-t", f"={NAME}:", "go", "Enter")
    assert task.wait() == 3


def test_a_session_that_cannot_be_closed_does_not_change_the_result(
    tasks: Tasks, tmux: OwnTmux, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    write_executable(
        tmp_path / "bin/tmux",
        f'#!/bin/sh\ncase $* in *kill-session*) echo stuck >&2; exit 1 ;; esac\nexec {shutil.which("tmux")} "$@"\n',
    )
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    task = tasks.sh("echo ran; read x", session=NAME, closes_session=True, environment={"PATH": path})
    tmux.wait_to_see(NAME, "ran")
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    assert task.wait() == 0
    assert task.record()["result"] == "completed"
    assert "its session could not be closed: tmux: stuck" in task.output()


def test_a_broken_tmux_is_reported_and_the_task_runs(tasks: Tasks, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    write_executable(tmp_path / "bin/tmux", "#!/bin/sh\necho broken >&2; exit 1\n")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    task = tasks.sh("echo ran", session=NAME, environment={"PATH": path})
    assert task.wait() == 0
    assert "no session: tmux: broken" in task.record()["note"]


def test_a_missing_socket_directory_is_reported_and_the_task_runs(tasks: Tasks) -> None:
    task = tasks.sh("echo ran", session=NAME, sockets=f"{tasks.folder}/nowhere")
    assert task.wait() == 0
    assert f"no session: {tasks.folder}/nowhere cannot be used: No such file" in task.record()["note"]


# Much output


def last_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 100))
        return file.read()


FLOOD_LINES = size(500_000, full=4_600_000)
FLOOD = f"echo up; read x; yes 0123456789 | head -c {FLOOD_LINES * 11}; echo the end; read x"


def wait_for_the_last_line(task: Task) -> None:
    wait_for(lambda: last_bytes(task.spec["log"]).endswith(b"the end\n"), "the end of the output")
    assert Path(task.spec["log"]).read_bytes().count(b"0123456789\n") == FLOOD_LINES


@unmeasured
def test_no_output_is_lost_under_load(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks, FLOOD)
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    wait_for_the_last_line(task)
    tmux.wait_to_see(NAME, "the end")
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    assert task.wait() == 0


def test_a_blocked_session_does_not_block_the_task_and_shows_its_last_output_later(tasks: Tasks, tmux: OwnTmux) -> None:
    task = shown(tasks, FLOOD)
    server = tmux.server()
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    task.wait_for_output("0123")
    os.kill(server, signal.SIGSTOP)
    try:
        wait_for_the_last_line(task)
    finally:
        os.kill(server, signal.SIGCONT)
    tmux.wait_to_see(NAME, "the end")
    assert "[some of the output is left out here; the log has all of it]" in tmux.screen(NAME)
    tmux("send-keys", "-t", f"={NAME}:", "Enter")
    assert task.wait() == 0
