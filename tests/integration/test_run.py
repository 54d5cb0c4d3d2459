"""`gpuyard run` as a person or a script uses it: real programs, signals, terminals and daemons on simulated GPUs."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.config import lease_dir
from gpuyard.core.lease import Lease
from gpuyard.leases.ledger import Ledger
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.usefixtures("two_gpus")

GPUYARD = [sys.executable, "-m", "gpuyard"]
DEADLINE_S = 90.0
Process = subprocess.Popen[str]
Start = Callable[..., Process]
unmeasured = pytest.mark.usefixtures("unmeasured")

# Says "ready", then the name of each signal it gets; ends when its input does. A read would not be interrupted by a
# signal that comes a moment before it.
LISTENER = (
    "import os, select, signal, sys\n"
    "woken, wake = os.pipe()\n"
    "os.set_blocking(wake, False)\n"
    "signal.set_wakeup_fd(wake)\n"
    "for name in sys.argv[1:]:\n"
    "    signal.signal(getattr(signal, name), lambda *_, name=name: print(name, flush=True))\n"
    "print('ready', flush=True)\n"
    "while 0 not in select.select([0, woken], [], [])[0]:\n"
    "    os.read(woken, 64)\n"
)
# Leaves a grandchild in a session of its own, with every descriptor closed, that lives until it is killed; ends itself
# when its input does.
DAEMONISER = (
    "import os, signal, sys\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork():\n"
    "        os._exit(0)\n"
    "    with open(sys.argv[1] + '.new', 'w') as file:\n"
    "        file.write(str(os.getpid()))\n"
    "    os.closerange(0, 1024)\n"
    "    os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    "    signal.pause()\n"
    "os.wait()\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a group of its own, which ends with the test."""
    started: list[Process] = []

    def begin(*command: str, **options: int) -> Process:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(command, text=True, process_group=0, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*GPUYARD, "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def leases() -> tuple[Lease, ...]:
    return Ledger(lease_dir()).leases() if lease_dir().exists() else ()


def until(condition: Callable[[], object], what: str) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"it never came to be that {what}"
        pause.wait(0.01)


def said(process: Process, stream: str = "stdout") -> str:
    return str(getattr(process, stream).readline()).strip()


def listener(start: Start, *names: str) -> Process:
    """A listener under `gpuyard run` that is ready to hear."""
    process = start(*GPUYARD, "run", "--", sys.executable, "-c", LISTENER, *names)
    assert said(process) == "ready"
    return process


def program_of(front: Process) -> psutil.Process:
    (keeper,) = psutil.Process(front.pid).children()
    (starter,) = keeper.children()
    (program,) = starter.children()
    return program


@unmeasured
@pytest.mark.parametrize(("script", "status"), [
    ("exit 0", 0), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137),
])  # fmt: skip
def test_the_status_is_the_programs_own(script: str, status: int) -> None:
    assert run("--", "sh", "-c", script).returncode == status
    assert leases() == ()
    assert sorted(os.listdir(lease_dir())) == ["mutex"]


@unmeasured
def test_streams_and_arguments_are_the_programs_own(start: Start) -> None:
    process = start(*GPUYARD, "run", "--", "sh", "-c", 'cat; echo "$0 $*" >&2', "--gpus", "a b")
    assert process.communicate("through\n", timeout=DEADLINE_S) == ("through\n", "--gpus a b\n")


def test_a_program_that_cannot_run_is_told_before_waiting(start: Start, tmp_path: Path) -> None:
    holder = listener(start)
    (tmp_path / "plain").write_text("")
    missing, plain = run("--device", "0", "--", "no-such-program"), run("--device", "0", str(tmp_path / "plain"))
    assert (missing.returncode, plain.returncode) == (127, 126)
    assert "no-such-program" in missing.stderr
    assert "waiting" not in missing.stderr + plain.stderr
    assert holder.poll() is None


@pytest.mark.parametrize(("line", "complaint"), [
    ("", "no program"),
    ("--device 7 -- true", "no GPU '7'"),
    ("--device , -- true", "--device names no GPU"),
    ("--gpus 3 -- true", "3 GPUs needed, but only 2 can be used"),
    ("--gpus 2 --device 1 -- true", "2 GPUs needed, but only 1 can be used"),
    ("--gpus 0 --vram 1G -- true", "--gpus 0 asks for no GPU"),
    ("--vram 25G -- true", "no GPU has"),
    ("--vram much -- true", "'much' is not a size"),
    ("--vram 0 -- true", "--vram is 0"),
    ("--wait soon -- true", "'soon' is not a time"),
    ("--no-such-option -- true", "--no-such-option"),
])  # fmt: skip
def test_nonsense_is_told_and_runs_nothing(line: str, complaint: str) -> None:
    result = run(*line.split())
    can_never_run = "needed, but only" in complaint or complaint == "no GPU has"
    assert result.returncode == (4 if can_never_run else 2)
    assert complaint in result.stderr


@unmeasured
@pytest.mark.parametrize(("options", "visible"), [
    ("--device 1", "1"), ("--gpus 2", "0,1"), ("--device SIM-1,0 --gpus 2", "0,1"),
    ("--vram 8G", "0"), ("--vram 8G --exclusive --device SIM-1", "1"), ("--gpus 0", "-1"),
])  # fmt: skip
def test_the_program_sees_exactly_its_devices(options: str, visible: str) -> None:
    assert run(*options.split(), "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.strip() == visible


@unmeasured
def test_under_an_outer_variable_the_numbers_are_still_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "SIM-1")
    shown = run("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER").stdout
    assert shown.strip() == "1 PCI_BUS_ID"
    inner = [*GPUYARD, "run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert run("--", *inner).stdout.strip() == "1"


@unmeasured
def test_uuids_are_shown_where_the_configuration_says_so(own_home: Path) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text('[devices]\nvisible = "uuid"\n')
    assert run("--gpus", "2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.strip() == "SIM-0,SIM-1"
    (own_home / "config.toml").write_text('[devices]\nvisible = "name"\n')
    refused = run("--", "true")
    assert refused.returncode == 2
    assert """visible = 'name' is unknown; write "index" or "uuid" - at `$.devices`""" in refused.stderr


def test_the_program_knows_its_lease_and_the_ledger_knows_the_program(start: Start) -> None:
    script = "echo $GPUYARD_LEASE; read line"
    process = start(*GPUYARD, "run", "--vram", "3G", "--label", "night", "--", "sh", "-c", script)
    lease_id = said(process)
    (lease,) = leases()
    (share,) = lease.shares
    assert (lease.id, lease.holder.label, lease.holder.pid) == (lease_id, "night", process.pid)
    assert (share.memory_mb, share.is_exclusive) == (3072, False)


@unmeasured
def test_the_program_gets_the_callers_descriptors_and_the_leases_and_no_other() -> None:
    reading, writing = os.pipe()
    script = "import os; [print(os.readlink(entry.path)) for entry in os.scandir('/proc/self/fd')]"
    command = [*GPUYARD, "run", "--", sys.executable, "-c", script]
    output = subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True, pass_fds=[writing])
    os.close(writing)
    seen = [name for name in output.splitlines() if not name.startswith("/proc/")]  # the listing's own
    assert sum(name.startswith("pipe:") for name in seen) == 2
    assert sum(name.endswith(".lease") for name in seen) == 1
    assert len(seen) == 5, seen
    assert os.read(reading, 1) == b"", "nobody else has kept the pipe"
    os.close(reading)


@unmeasured
def test_signals_that_the_caller_ignores_stay_ignored() -> None:
    ask = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGTERM).name)"
    command = ["nohup", *GPUYARD, "run", "--", sys.executable, "-c", ask]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.stdout.strip() == "SIG_IGN SIG_DFL"


@unmeasured
def test_two_runs_take_turns_and_the_second_says_whom_it_waits_for(start: Start) -> None:
    device = ["run", "--device", "0"]
    first = start(*GPUYARD, *device, "--label", "first one", "--", "sh", "-c", "echo ready; read line")
    assert said(first) == "ready"
    second = start(*GPUYARD, *device, "--", "sh", "-c", "echo second")
    waiting = said(second, "stderr")
    assert waiting.startswith("gpuyard: waiting for 1 GPU: GPU 0: held by ")
    assert f"pid {first.pid} (first one)" in waiting
    assert first.poll() is None
    first.communicate("\n", timeout=DEADLINE_S)
    assert second.communicate(timeout=DEADLINE_S) == ("second\n", "")


def test_waiting_too_long_says_what_was_missing(start: Start) -> None:
    holder = listener(start)
    result = run("--device", "0", "--wait", "2s", "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (124, "")
    waiting, told, *reasons = result.stderr.splitlines()
    assert waiting.startswith("gpuyard: waiting for 1 GPU: GPU 0: held by ")
    assert told == "gpuyard: 1 device could not be leased within 2 s"
    assert any(f"pid {holder.pid}" in reason for reason in reasons)


def test_the_machine_must_have_room_too() -> None:
    result = run("--gpus", "0", "--min-free-mem-mb", "99999999", "--wait", "0", "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (124, "")
    assert "RAM" in result.stderr
    assert "to change that: --min-free-mem-mb" in result.stderr


@unmeasured
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to gpuyard", "to its group"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT"])
def test_a_signal_reaches_the_program_once(start: Start, name: str, send: Callable[[int, int], None]) -> None:
    after = "SIGUSR2" if name == "SIGUSR1" else "SIGUSR1"
    process = listener(start, name, after)
    send(process.pid, getattr(signal, name))
    assert said(process) == name
    process.send_signal(getattr(signal, after))  # it comes after whatever is still on its way
    assert said(process) == after
    process.send_signal(getattr(signal, name))
    assert said(process) == name
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0


def test_killed_with_9_the_program_goes_on_and_the_lease_with_it_and_no_longer(start: Start) -> None:
    process = listener(start)
    program = program_of(process)
    helpers = program.parents()[:2]
    process.kill()
    process.wait(DEADLINE_S)
    assert program.is_running()
    assert [lease.holder.pid for lease in leases()] == [process.pid]
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not leases(), "the lease ended with the program")
    assert psutil.wait_procs([program, *helpers], timeout=DEADLINE_S)[1] == []
    assert sorted(os.listdir(lease_dir())) == ["mutex"]


@unmeasured
@pytest.mark.parametrize("is_group_killed", [False, True])
def test_what_the_program_leaves_behind_keeps_the_lease(start: Start, tmp_path: Path, is_group_killed: bool) -> None:
    process = start(*GPUYARD, "run", "--", sys.executable, "-c", DAEMONISER, str(tmp_path / "pid"))
    until((tmp_path / "pid").exists, "the daemon was there")
    daemon = psutil.Process(int((tmp_path / "pid").read_text()))
    (keeper,) = psutil.Process(process.pid).children()
    if is_group_killed:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.communicate(timeout=DEADLINE_S) == ("", "")
    assert process.returncode == (-signal.SIGKILL if is_group_killed else 0)
    assert len(leases()) == 1
    assert run("--device", "0", "--wait", "0", "--", "true").returncode == 124
    daemon.kill()
    until(lambda: not leases(), "the lease ended with the daemon")
    assert run("--device", "0", "--wait", "0", "--", "true").returncode == 0
    assert psutil.wait_procs([daemon, keeper], timeout=DEADLINE_S)[1] == []


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    shell = Terminal(["bash", "--norc", "--noprofile", "--noediting", "-i"], {"PS1": "$ "})
    yield shell
    shell.close()


RUN = " ".join([*GPUYARD, "run"])


@unmeasured
@pytest.mark.needs("bash", "setsid")
def test_ctrl_c_reaches_the_program_once(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "listener.py").write_text(LISTENER)
    # Otherwise the terminal throws away what it has not shown yet, also what the program says to the signal.
    terminal.type("stty noflsh\n")
    terminal.type(f"{RUN} -- {sys.executable} {tmp_path}/listener.py SIGINT; echo status=$?\n")
    terminal.read_until("ready\r\n")
    terminal.type("\x03")
    terminal.read_until("SIGINT\r\n")
    terminal.type("\x04")
    assert "SIGINT" not in terminal.read_until("status=0")


@pytest.mark.needs("bash", "setsid")
def test_ctrl_z_stops_the_program_and_fg_goes_on_with_it(terminal: Terminal) -> None:
    terminal.type(f"{RUN} -- cat\n")
    for word in ("first", "second", "third"):
        terminal.type(f"{word}\n")
        terminal.read_until(word)
        terminal.read_until(word)  # once as it was typed, once as it was answered
        terminal.type("\x1a")
        terminal.read_until("Stopped")
        terminal.type("echo $((40 + 2)); fg\n")
        terminal.read_until("42\r\n")
        terminal.read_until("run -- cat")
    terminal.type("\x04")
    terminal.read_until("$ ")
    terminal.type("echo status=$?\n")
    terminal.read_until("status=0")


@pytest.mark.needs("bash", "setsid")
def test_on_a_terminal_the_waiting_line_stays_in_its_place(start: Start, terminal: Terminal) -> None:
    holder = listener(start)
    terminal.type(f"{RUN} --device 0 -- echo go''ing\n")
    terminal.read_until(f"pid {holder.pid}")
    holder.communicate(timeout=DEADLINE_S)
    before = terminal.read_until("going")
    assert before.endswith("\r\x1b[K")
    assert "\n" not in before


@unmeasured
def test_ten_that_start_at_once_never_take_more_than_fits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    job = ["sim-job", "--vram", "4G", "--ramp", "600ms", "--seconds", "900ms"]
    runs = [start(*GPUYARD, "run", "--vram", "4G", "--", *GPUYARD, *job) for _ in range(10)]
    at_once, used_mb = [0], [0.0]
    devices = SimulatedDevices()

    def are_done() -> bool:
        at_once.append(len(leases()))
        used_mb.append(devices.read(1.0).devices[0].memory_used_mb or 0.0)
        return all(process.poll() is not None for process in runs)

    until(are_done, "all ten were done")
    outputs = [process.communicate() for process in runs]
    assert [process.returncode for process in runs] == [0] * 10, outputs
    assert not any("OutOfMemory" in errors for _, errors in outputs)
    assert 1 < max(at_once) <= 6
    assert 4096 < max(used_mb) <= 24576


def test_ramps_that_fill_a_device_to_the_last_byte_do_not_fail_for_rounding() -> None:
    usages = [SimulatedUse() for _ in range(6)]
    for usage, _ in itertools.product(usages, range(50)):
        usage.allocate("SIM-0", 4096 / 50)
    assert {process.memory_mb for process in SimulatedDevices().read(1.0).devices[0].processes or ()} == {4096}
    for usage in usages:
        usage.close()


@unmeasured
def test_a_stranger_without_a_lease_is_respected(start: Start) -> None:
    stranger = start(*GPUYARD, "sim-job", "--vram", "20G", "--seconds", "600")
    assert "holding" in said(stranger)
    shared = start(*GPUYARD, "run", "--device", "0", "--vram", "8G", "--", "echo", "beside")
    alone = start(*GPUYARD, "run", "--device", "0", "--", "echo", "alone")
    assert "4 GB free, 8 GB needed" in said(shared, "stderr")
    assert "GPU 0: " in said(alone, "stderr")
    assert run("--device", "0", "--vram", "4G", "--wait", "0", "--", "true").returncode == 0
    stranger.kill()
    assert shared.communicate(timeout=DEADLINE_S)[0] == "beside\n"
    assert alone.communicate(timeout=DEADLINE_S)[0] == "alone\n"


@unmeasured
def test_a_tiny_idle_stranger_does_not_keep_a_run_from_a_whole_device() -> None:
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 200)
        result = run("--device", "0", "--wait", "0", "--", "echo", "alone")
    assert (result.returncode, result.stdout) == (0, "alone\n")
