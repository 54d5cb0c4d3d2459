"""The usage meter: what a program's processes hold on simulated devices and of RAM, until it ends."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuyard.cluster_node.node_programs import memory_of
from gpuyard.model.job import Usage
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from tests.integration.engine_fixture import is_gone, wait_for

Child = subprocess.Popen[str]
# Allocates the given amounts on simulated devices, then further amounts that it reads from its input.
TAKE = (
    "import itertools, sys\n"
    "from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse\n"
    "with SimulatedUse(SimulatedDevices()) as usage:\n"
    "    for line in itertools.chain(sys.argv[1:], sys.stdin):\n"
    "        if line == 'end\\n':\n"
    "            break\n"
    "        device, _, megabytes = line.partition('=')\n"
    "        usage.allocate(device, float(megabytes))\n"
    "        print('taken', flush=True)\n"
)
# Starts another program in its own session, and allocates memory too.
LEAD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', *eval(sys.argv.pop(1))], start_new_session=True)\n"
)
# Starts another program, and ends.
ORPHAN = (
    "import subprocess, sys\n"
    "START = 'import subprocess, sys; subprocess.Popen([sys.executable, \\'-c\\', *sys.argv[1:]])'\n"
    "subprocess.run([sys.executable, '-c', START, *eval(sys.argv.pop(1))])\n"
)
HOLD = "import sys; kept = bytearray(int(sys.argv[1]) << 20); print('taken', flush=True); sys.stdin.read()"


class World:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "0.usage"
        self._started: list[Child] = []

    def program(self, *arguments: str, answers: int = 1) -> Child:
        """Start a program in its own session, and wait until it has reported `answers` allocations."""
        process = self._start(arguments, start_new_session=True)
        assert process.stdout is not None
        for _ in range(answers):
            assert process.stdout.readline() == "taken\n"
        return process

    def meter(self, pid: int) -> Child:
        code = "from gpuyard.cluster_node.node_programs import main; main()"
        return self._start(("-c", code, "meter", str(pid), str(self.file)), start_new_session=False)

    def _start(self, arguments: tuple[str, ...], *, start_new_session: bool) -> Child:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=start_new_session,
        )  # fmt: skip
        self._started.append(process)
        return process

    def usage(self) -> Usage:
        """Return the content of the file, which is never partial."""
        return msgspec.json.decode(self.file.read_bytes(), type=Usage) if self.file.exists() else Usage()

    def wait_for_peaks(self, expected: dict[str, float]) -> None:
        wait_for(lambda: self.usage().peaks_mb == expected, f"{expected}")

    def close(self) -> None:
        """End all programs. Their children have the same input, and end with it."""
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    world = World(tmp_path)
    yield world
    world.close()


def say(process: Child, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def test_the_peak_on_each_device_is_reported_as_it_grows(world: World) -> None:
    program = world.program("-c", TAKE, "SIM-0=1000", "SIM-1=300", answers=2)
    world.program("-c", TAKE, "SIM-0=5000")  # a foreign process
    meter = world.meter(program.pid)
    world.wait_for_peaks({"SIM-0": 1000.0, "SIM-1": 300.0})
    say(program, "SIM-1=500")
    world.wait_for_peaks({"SIM-0": 1000.0, "SIM-1": 800.0})
    program.kill()
    program.wait()
    assert meter.wait(60) == 0
    usage = world.usage()
    assert usage.peaks_mb == {"SIM-0": 1000.0, "SIM-1": 800.0}
    assert usage.curve[0][1] == 1300.0
    assert usage.curve[-1][1] in (1800.0, 0.0)
    assert usage.ram_mb is not None
    assert stat.S_IMODE(world.file.stat().st_mode) == 0o600


def test_a_child_in_a_session_of_its_own_counts(world: World) -> None:
    child = repr((TAKE, "SIM-1=700"))
    program = world.program("-c", LEAD + TAKE, child, "SIM-0=200", answers=2)
    world.meter(program.pid)
    world.wait_for_peaks({"SIM-0": 200.0, "SIM-1": 700.0})


def test_an_orphaned_process_of_the_session_counts(world: World) -> None:
    program = world.program("-c", ORPHAN + TAKE, repr((TAKE, "SIM-1=700")), "SIM-0=200", answers=2)
    world.meter(program.pid)
    world.wait_for_peaks({"SIM-0": 200.0, "SIM-1": 700.0})


def test_ram_is_the_sum_over_all_processes(world: World) -> None:
    program = world.program("-c", LEAD + HOLD, repr((HOLD, "80")), "60", answers=2)
    world.meter(program.pid)
    wait_for(lambda: (world.usage().ram_mb or 0.0) > 140, "the RAM of both")
    assert (world.usage().ram_mb or 0.0) < 220
    assert world.usage().peaks_mb == {}


def test_the_meter_ends_when_the_program_has_ended_even_before_it_is_reaped(world: World) -> None:
    program = world.program("-c", TAKE, "SIM-0=100")
    meter = world.meter(program.pid)
    world.wait_for_peaks({"SIM-0": 100.0})
    os.kill(program.pid, signal.SIGKILL)
    assert meter.wait(60) == 0
    assert is_gone(program.pid)
    assert program.returncode is None


def test_a_program_that_has_already_ended_leaves_no_figures(world: World) -> None:
    program = world.program("-c", TAKE, "SIM-0=100")
    program.kill()
    program.wait()
    assert world.meter(program.pid).wait(60) == 0
    assert not world.file.exists()


def test_signals_that_a_site_sends_to_the_session_do_not_end_the_meter(world: World) -> None:
    program = world.program("-c", TAKE, "SIM-0=100")
    meter = world.meter(program.pid)
    world.wait_for_peaks({"SIM-0": 100.0})
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
        meter.send_signal(signum)
    say(program, "SIM-0=400")
    world.wait_for_peaks({"SIM-0": 500.0})
    assert meter.poll() is None


def test_figures_that_cannot_be_written_are_written_later(world: World) -> None:
    program = world.program("-c", TAKE, "SIM-0=100")
    world.file.mkdir()
    before = world.file.parent.stat().st_mtime_ns
    world.meter(program.pid)
    wait_for(lambda: world.file.parent.stat().st_mtime_ns != before, "a first attempt to write")
    world.file.rmdir()
    world.wait_for_peaks({"SIM-0": 100.0})


# Attribution of memory


def device(name: str, *processes: Process, parent: str | None = None) -> Device:
    return Device(id=name, vendor=Vendor.NVIDIA, parent=parent, processes=processes)


def seen(*devices: Device) -> Snapshot:
    return Snapshot(taken_at=1.0, host=Host(), devices=devices)


def test_only_devices_used_by_the_program_are_reported() -> None:
    mine, also, others = (Process(pid=pid, memory_mb=100.0 * pid) for pid in (1, 2, 3))
    snapshot = seen(device("a", mine, others), device("b", others), device("c", mine, also), device("d"))
    assert memory_of({1, 2}, snapshot) == {"a": 100.0, "c": 300.0}


def test_hidden_memory_is_unknown_and_not_zero() -> None:
    snapshot = seen(device("a", Process(pid=1), Process(pid=2, memory_mb=50.0)))
    assert memory_of({1, 2}, snapshot) == {"a": None}
    assert memory_of({2}, snapshot) == {"a": 50.0}


def test_a_card_that_is_split_is_not_counted_beside_its_parts() -> None:
    process = Process(pid=1, memory_mb=50.0)
    assert memory_of({1}, seen(device("card", process), device("part", process, parent="card"))) == {"part": 50.0}
