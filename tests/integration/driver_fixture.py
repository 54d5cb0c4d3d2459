"""A machine with one NVIDIA card, a stand-in for its driver, and programs that use it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.model.job import Attempt
from tests.fakes.cuda import FakeCuda, build_fake_cuda
from tests.fakes.nvml import FakeDevice, FakeMemory, FakeNvml, FakeProcess, FakeState, build_fake_nvml
from tests.integration.engine_fixture import log_of, wait_for
from tests.integration.suspend_fixture import begun, script, wait_for_line

CARD = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
MIB = 1048576

# A program that prints that it uses the device, works on it (each piece waits while the driver holds it), and starts
# another like itself when the file `spawn` exists, until the file `finish` exists.
USER = """
import os, subprocess, sys, time
from pathlib import Path
state, me = Path(os.environ["FAKE_CUDA_STATE"]), os.getpid()
if len(sys.argv) > 1:
    import mmap
    shared = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
(state / f"{me}.new").write_text("0")
(state / f"{me}.new").rename(state / str(me))
print("using", me, flush=True)
others = []
while not (state / "finish").exists():
    if (state / "spawn").exists():
        (state / "spawn").unlink()
        others.append(subprocess.Popen([sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2]]))
    if (state / str(me)).read_text().split()[:1] == ["0"]:
        (state / f"{me}.pieces").open("a").write("x")
    time.sleep(0.002)
for other in others:
    other.wait()
print("done", me, flush=True)
"""
# A shell that starts two of these programs, and a `sleep` that uses no device.
TREE = """
"$1" -c "$2" $3 &
"$1" -c "$2" $3 &
sleep 600 &
echo shell $$
wait %1 %2
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    build_fake_nvml(folder)
    build_fake_cuda(folder)
    return folder


class Card:
    """A card with a state that the test sets, and the state of the programs on it."""

    def __init__(self, libraries: Path, tmp_path: Path) -> None:
        self.nvml = FakeNvml(library=libraries / "libnvidia-ml.so.1", state_file=tmp_path / "nvml")
        self.cuda = FakeCuda(folder=tmp_path / "cuda")
        self.cuda.folder.mkdir()
        self.set_free(80000)

    def set_free(self, free_mb: int, held_mb: dict[int, int] | None = None) -> None:
        """`held_mb`: what processes hold, by pid."""
        memory = FakeMemory(total=81920 * MIB, used=(81920 - free_mb) * MIB)
        processes = tuple(FakeProcess(pid=pid, memory=held * MIB) for pid, held in (held_mb or {}).items())
        self.nvml.write(FakeState(devices=(FakeDevice(uuid=CARD, memory=memory, processes=processes),)))

    def environment(self) -> dict[str, str]:
        return {**self.nvml.environment(), "FAKE_CUDA_STATE": str(self.cuda.folder)}

    def states(self, pids: list[int]) -> list[str]:
        return [self.cuda.state(pid) for pid in pids]

    def pieces(self, pid: int) -> int:
        path = self.cuda.folder / f"{pid}.pieces"
        return path.stat().st_size if path.exists() else 0

    def finish(self) -> None:
        (self.cuda.folder / "finish").touch()


@pytest.fixture
def card(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card(libraries, tmp_path)
    for name, value in card.environment().items():
        monkeypatch.setenv(name, value)
    yield card
    card.finish()


def users_in(folder: Path, job_id: int, count: int) -> list[int]:
    """Wait until `count` processes use the device, and return their pids."""

    def found() -> list[int]:
        path = folder / "logs" / f"{job_id}.1.log"
        lines = log_of(folder, job_id).splitlines() if path.exists() else []
        return sorted(int(line.split()[1]) for line in lines if line.startswith("using "))

    wait_for(lambda: len(found()) == count, f"{count} that use the device")
    return found()


def one_user(engine: LocalEngine, folder: Path, job_id: int = 1) -> tuple[Attempt, int]:
    attempt = script(engine, job_id, USER, devices=(CARD,))
    return attempt, users_in(folder, job_id, 1)[0]


def tree_of_users(engine: LocalEngine, folder: Path, *arguments: str) -> tuple[Attempt, list[int], int]:
    """Start `TREE`. Return the attempt, the pids of the two processes that use the device, and their shell's."""
    attempt = begun(engine, 1, "/bin/sh", "-c", TREE, "sh", sys.executable, USER, *arguments, devices=(CARD,))
    users = users_in(folder, 1, 2)
    wait_for_line(folder, 1, "shell ")
    shell = next(int(line.split()[1]) for line in log_of(folder, 1).splitlines() if line.startswith("shell "))
    return attempt, users, shell


def children_of(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children()]


def works_on(card: Card, pid: int) -> None:
    before = card.pieces(pid)
    wait_for(lambda: card.pieces(pid) > before, f"more work of process {pid}")
