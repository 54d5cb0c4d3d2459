"""Messages while `GPUScheduler` waits, how often it samples the GPUs, and how the wait ends."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue

import pytest

from gpuyard import GPUScheduler
from gpuyard.config import lease_dir
from gpuyard.errors import UserError
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.probes.local_machine import snapshot
from gpuyard.probes.simulated_devices import SimulatedUse
from tests.integration.conftest import HOLD, Script

pytestmark = pytest.mark.usefixtures("two_gpus")

DEADLINE_S = 90.0
# The interval of the first samples after a process ended: the driver takes some time to free memory.
QUICK_LOOKS = 6


@pytest.fixture
def holder(script: Script) -> "subprocess.Popen[str]":
    """A script that holds both GPUs until it reads a line."""
    process = script(num_gpus=2, label="nightly")
    assert process.stdout is not None
    assert process.stdout.readline() == "[0, 1]\n"
    return process


@pytest.fixture
def waiter(request: pytest.FixtureRequest, holder: "subprocess.Popen[str]") -> Script:
    """A script that waits for GPU 1, with its stderr in a pipe."""

    def start(**options: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD, repr({"specific_gpus": [1], "vram": "1G", **options})]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        request.addfinalizer(process.communicate)
        request.addfinalizer(process.kill)
        return process

    return start


def let_go(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n", timeout=DEADLINE_S)


def until_waiting() -> None:
    pause = threading.Event()
    deadline = time.monotonic() + DEADLINE_S
    while not Ledger(lease_dir()).contents().tickets:
        assert time.monotonic() < deadline, "no ticket appeared"
        pause.wait(0.01)


def test_one_line_says_what_it_waits_for_and_another_that_it_continues(
    waiter: Script, holder: "subprocess.Popen[str]"
) -> None:
    waiting = waiter()
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    user = Ledger(lease_dir()).leases()[0].holder.user
    assert line == f"gpuyard: waiting for 1 GPU: GPU 1: held by {user}, pid {holder.pid} (nightly)\n"
    let_go(holder)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "[1]\n"
    rest = waiting.communicate("\n", timeout=DEADLINE_S)[1]
    assert rest.startswith("gpuyard: going on with GPU 1 after ")
    assert rest.count("\n") == 1


def test_quiet_prints_nothing(waiter: Script, holder: "subprocess.Popen[str]") -> None:
    waiting = waiter(quiet=True)
    until_waiting()
    let_go(holder)
    assert waiting.communicate("\n", timeout=DEADLINE_S) == ("[1]\n", "")


def test_a_request_granted_at_once_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with GPUScheduler(), GPUScheduler(progress=lines.append):
        pass
    assert (lines, capfd.readouterr().err) == ([], "")


def test_progress_receives_the_lines_in_place_of_stderr(
    script: Script, holder: "subprocess.Popen[str]", capfd: pytest.CaptureFixture[str]
) -> None:
    lines: Queue[str] = Queue()
    waiting = threading.Thread(target=lambda: GPUScheduler(num_gpus=2, progress=lines.put).acquire(), daemon=True)
    second = script(num_gpus=2, label="urgent", priority=5, quiet=True)
    until_waiting()
    waiting.start()
    assert f"pid {holder.pid} (nightly)" in lines.get(timeout=DEADLINE_S)
    let_go(holder)
    while f"pid {second.pid} (urgent)" not in lines.get(timeout=DEADLINE_S):
        pass
    let_go(second)
    while not (last := lines.get(timeout=DEADLINE_S)).startswith("gpuyard: going on with GPU 0, 1 after "):
        assert last.startswith("gpuyard: waiting for 2 GPUs: ")
    waiting.join(DEADLINE_S)
    assert capfd.readouterr().err == ""


def test_a_progress_callback_that_raises_ends_the_wait(holder: "subprocess.Popen[str]") -> None:
    def stop(line: str) -> None:
        raise InterruptedError(line)

    with pytest.raises(InterruptedError, match="waiting for 1 GPU"):
        GPUScheduler(progress=stop).acquire()
    assert Ledger(lease_dir()).contents().tickets == ()


def test_a_progress_callback_that_raises_after_the_grant_releases_the_gpu(script: Script) -> None:
    other = script(num_gpus=2)
    assert other.stdout is not None
    assert other.stdout.readline() == "[0, 1]\n"

    def stop_at_the_end(line: str) -> None:
        if "going on" in line:
            raise InterruptedError
        let_go(other)

    with pytest.raises(InterruptedError):
        GPUScheduler(progress=stop_at_the_end).acquire()
    assert Ledger(lease_dir()).leases() == ()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Queue[float]:
    """The times at which `GPUScheduler` sampled the GPUs."""
    times: Queue[float] = Queue()

    def look() -> Snapshot:
        times.put(time.monotonic())
        return snapshot()

    monkeypatch.setattr("gpuyard.scripting.gpu_scheduler.snapshot", look)
    return times


@pytest.mark.parametrize("poll_interval", [0.1, 0.7])
def test_the_gpus_are_sampled_once_per_poll_interval(looks: Queue[float], poll_interval: float) -> None:
    """No event reports memory that a foreign process frees: only a sample of the GPU shows it."""
    taken: list[list[int]] = []
    scheduler = GPUScheduler(specific_gpus=[0], poll_interval=poll_interval, quiet=True)
    waiting = threading.Thread(target=lambda: taken.append(scheduler.acquire()), daemon=True)
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 20480)
        waiting.start()
        times = [looks.get(timeout=DEADLINE_S) for _ in range(QUICK_LOOKS + 6)]
        assert taken == []
    waiting.join(DEADLINE_S)
    assert taken == [[0]]
    apart = [after - before for before, after in zip(times[-3:], times[-2:], strict=False)]
    assert min(apart) >= poll_interval * 0.99


@pytest.mark.parametrize("poll_interval", [-1, float("nan")])
def test_an_invalid_poll_interval_is_refused(poll_interval: float) -> None:
    with pytest.raises(UserError, match="poll_interval is"):
        GPUScheduler(poll_interval=poll_interval)


def test_a_ledger_that_stays_locked_raises_a_timeout() -> None:
    with GPUScheduler():
        pass  # creates the ledger
    with hold_mutex(Path(lease_dir()), 1.0), pytest.raises(TimeoutError, match=r"was busy for 0\.1 s"):
        GPUScheduler(timeout=0.1).acquire()
