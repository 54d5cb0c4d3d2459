"""`gpuyard run` with real programs, signals, terminals and daemons on simulated GPUs."""

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
from gpuyard.ledger.ledger import Ledger
from gpuyard.model.lease import Lease
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.usefixtures("two_gpus")

GPUYARD = [sys.executable, "-m", "gpuyard"]
DEADLINE_S = 90.0
Process = subprocess.Popen[str]
Start = Callable[..., Process]
unmeasured = pytest.mark.usefixtures("unmeasured")

# Prints "ready", then the name of each signal it gets; ends at the end of its input. A blocking read would not be
# interrupted by a signal that comes a moment before it.
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
# Starts a grandchild in a session of its own, with every descriptor closed, that lives until it is killed; ends itself
# at the end of its input.
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
    """Start processes in groups of their own, which end with the test."""
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
        assert time.monotonic() < deadline, f"timeout: {what}"
        pause.wait(0.01)


def read_line(process: Process, stream: str = "stdout") -> str:
    return str(getattr(process, stream).readline()).strip()


def listener(start: Start, *names: str) -> Process:
    """Start a listener under `gpuyard run` and wait until it is ready."""
    process = start(*GPUYARD, "run", "--", sys.executable, "-c", LISTENER, *names)
    assert read_line(process) == "ready"
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
def test_the_exit_status_is_that_of_the_program(script: str, status: int) -> None:
    assert run("--", "sh", "-c", script).returncode == status
    assert leases() == ()
    assert sorted(os.listdir(lease_dir())) == []


@unmeasured
def test_streams_and_arguments_are_passed_to_the_program(start: Start) -> None:
    process = start(*GPUYARD, "run", "--", "sh", "-c", 'cat; echo "$0 $*" >&2', "--gpus", "a b")
    assert process.communicate("through\n", timeout=DEADLINE_S) == ("through\n", "--gpus a b\n")


def test_a_program_that_cannot_be_executed_is_reported_before_waiting(start: Start, tmp_path: Path) -> None:
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
    ("--image img --mount /data -- true", "gpuyard submit --image IMAGE -- CMD"),
    ("--vram 25G -- true", "no GPU has"),
    ("--vram much -- true", "'much' is not a size"),
    ("--vram 0 -- true", "--vram 0 is out of range"),
    ("--wait soon -- true", "'soon' is not a time"),
    ("--no-such-option -- true", "--no-such-option"),
])  # fmt: skip
def test_invalid_options_are_reported_and_run_nothing(line: str, complaint: str) -> None:
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
def test_an_outer_cuda_visible_devices_does_not_change_device_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "SIM-1")
    shown = run("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER").stdout
    assert shown.strip() == "1 PCI_BUS_ID"
    inner = [*GPUYARD, "run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert run("--", *inner).stdout.strip() == "1"


@unmeasured
def test_the_program_sees_uuids_if_configured(own_home: Path) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text('[devices]\nvisible = "uuid"\n')
    assert run("--gpus", "2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.strip() == "SIM-0,SIM-1"
    (own_home / "config.toml").write_text('[devices]\nvisible = "name"\n')
    refused = run("--", "true")
    assert refused.returncode == 2
    assert "config.toml:2: [devices] visible takes 'index' or 'uuid', not 'name'\n" in refused.stderr


def test_the_program_has_its_lease_id_and_the_lease_has_its_pid(start: Start) -> None:
    script = "echo $GPUYARD_LEASE; read line"
    process = start(*GPUYARD, "run", "--vram", "3G", "--label", "night", "--", "sh", "-c", script)
    lease_id = read_line(process)
    (lease,) = leases()
    (share,) = lease.shares
    assert (lease.id, lease.holder.label, lease.holder.pid) == (lease_id, "night", process.pid)
    assert (share.memory_mb, share.is_exclusive) == (3072, False)


@unmeasured
def test_the_program_inherits_only_the_callers_descriptors_and_the_lease() -> None:
    reading, writing = os.pipe()
    script = "import os; [print(os.readlink(entry.path)) for entry in os.scandir('/proc/self/fd')]"
    command = [*GPUYARD, "run", "--", sys.executable, "-c", script]
    output = subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True, pass_fds=[writing])
    os.close(writing)
    open_files = [name for name in output.splitlines() if not name.startswith("/proc/")]  # the listing's own
    assert sum(name.startswith("pipe:") for name in open_files) == 2
    assert sum(name.endswith(".lease") for name in open_files) == 1
    assert len(open_files) == 5, open_files
    assert os.read(reading, 1) == b"", "no other process keeps the pipe open"
    os.close(reading)


@unmeasured
def test_signals_ignored_by_the_caller_stay_ignored() -> None:
    ask = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGTERM).name)"
    command = ["nohup", *GPUYARD, "run", "--", sys.executable, "-c", ask]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.stdout.strip() == "SIG_IGN SIG_DFL"


@unmeasured
def test_two_runs_take_turns_and_the_second_names_the_holder(start: Start) -> None:
    device = ["run", "--device", "0"]
    first = start(*GPUYARD, *device, "--label", "first one", "--", "sh", "-c", "echo ready; read line")
    assert read_line(first) == "ready"
    second = start(*GPUYARD, *device, "--", "sh", "-c", "echo second")
    waiting = read_line(second, "stderr")
    assert waiting.startswith("gpuyard: waiting for 1 GPU: GPU 0: held by ")
    assert f"pid {first.pid} (first one)" in waiting
    assert first.poll() is None
    first.communicate("\n", timeout=DEADLINE_S)
    assert second.communicate(timeout=DEADLINE_S) == ("second\n", "")


@unmeasured
def test_the_run_of_higher_priority_goes_first(start: Start, tmp_path: Path) -> None:
    order = tmp_path / "order"
    both = [*GPUYARD, "run", "--gpus", "2"]
    holder = start(*both, "--", "sh", "-c", "echo ready; read line")
    assert read_line(holder) == "ready"
    waiting: list[Process] = []
    for options in (["--priority", "-1"], [], ["--priority", "5"]):
        waiting.append(start(*both, *options, "--", "sh", "-c", 'echo "$0" >> "$1"', str(options[1:]), str(order)))
        until(lambda: len(Ledger(lease_dir()).contents().tickets) == len(waiting), "its ticket")
    holder.communicate("\n", timeout=DEADLINE_S)
    for each in waiting:
        each.communicate(timeout=DEADLINE_S)
    assert order.read_text().splitlines() == ["['5']", "[]", "['-1']"]


def test_a_timeout_prints_the_reasons(start: Start) -> None:
    holder = listener(start)
    result = run("--device", "0", "--wait", "2s", "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (124, "")
    waiting, message, *reasons = result.stderr.splitlines()
    assert waiting.startswith("gpuyard: waiting for 1 GPU: GPU 0: held by ")
    assert message == "gpuyard: 1 device could not be leased within 2 s"
    assert any(f"pid {holder.pid}" in reason for reason in reasons)


def test_a_run_waits_for_free_ram_too() -> None:
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
    assert read_line(process) == name
    process.send_signal(getattr(signal, after))  # it arrives after all earlier signals
    assert read_line(process) == after
    process.send_signal(getattr(signal, name))
    assert read_line(process) == name
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0


def test_after_kill_9_of_run_the_lease_lasts_as_long_as_the_program(start: Start) -> None:
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
    assert sorted(os.listdir(lease_dir())) == []


@unmeasured
@pytest.mark.parametrize("is_group_killed", [False, True])
def test_a_process_left_by_the_program_keeps_the_lease(start: Start, tmp_path: Path, is_group_killed: bool) -> None:
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
    # Otherwise the terminal discards output that it has not shown yet, including the program's answer to the signal.
    terminal.type("stty noflsh\n")
    terminal.type(f"{RUN} -- {sys.executable} {tmp_path}/listener.py SIGINT; echo status=$?\n")
    terminal.read_until("ready\r\n")
    terminal.type("\x03")
    terminal.read_until("SIGINT\r\n")
    terminal.type("\x04")
    assert "SIGINT" not in terminal.read_until("status=0")


@pytest.mark.needs("bash", "setsid")
def test_ctrl_z_stops_the_program_and_fg_continues_it(terminal: Terminal) -> None:
    terminal.type(f"{RUN} -- cat\n")
    for line in ("first", "second", "third"):
        terminal.type(f"{line}\n")
        terminal.read_until(line)
        terminal.read_until(line)  # the echo and the program's answer
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
def test_on_a_terminal_the_waiting_message_is_updated_in_place(start: Start, terminal: Terminal) -> None:
    holder = listener(start)
    terminal.type(f"{RUN} --device 0 -- echo go''ing\n")
    terminal.read_until(f"pid {holder.pid}")
    holder.communicate(timeout=DEADLINE_S)
    before = terminal.read_until("going")
    assert before.endswith("\r\x1b[K")
    assert "\n" not in before


@unmeasured
def test_ten_simultaneous_runs_never_exceed_the_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_ramps_that_fill_a_device_exactly_do_not_fail_from_rounding() -> None:
    usages = [SimulatedUse() for _ in range(6)]
    for usage, _ in itertools.product(usages, range(50)):
        usage.allocate("SIM-0", 4096 / 50)
    assert {process.memory_mb for process in SimulatedDevices().read(1.0).devices[0].processes or ()} == {4096}
    for usage in usages:
        usage.close()


@unmeasured
def test_memory_of_a_foreign_process_counts_as_taken(start: Start) -> None:
    foreign_process = start(*GPUYARD, "sim-job", "--vram", "20G", "--seconds", "600")
    assert "holding" in read_line(foreign_process)
    shared = start(*GPUYARD, "run", "--device", "0", "--vram", "8G", "--", "echo", "beside")
    alone = start(*GPUYARD, "run", "--device", "0", "--", "echo", "alone")
    assert "4 GB free, 8 GB needed" in read_line(shared, "stderr")
    assert "GPU 0: " in read_line(alone, "stderr")
    assert run("--device", "0", "--vram", "4G", "--wait", "0", "--", "true").returncode == 0
    foreign_process.kill()
    assert shared.communicate(timeout=DEADLINE_S)[0] == "beside\n"
    assert alone.communicate(timeout=DEADLINE_S)[0] == "alone\n"


@unmeasured
def test_a_small_idle_foreign_process_does_not_block_an_exclusive_run() -> None:
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 200)
        result = run("--device", "0", "--wait", "0", "--", "echo", "alone")
    assert (result.returncode, result.stdout) == (0, "alone\n")
