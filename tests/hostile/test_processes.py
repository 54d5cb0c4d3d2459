"""Attacks on another user's processes, and with processes that pretend to be another user's."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gpuyard.ledger.measured_usage import LEASE_VARIABLE, LeaseFinder, find_foreign_processes
from gpuyard.model.lease import Holder, Lease, Share
from gpuyard.model.machine_snapshot import Device, Process, Vendor
from gpuyard.probes.devices_and_processes import describe_processes
from tests.hostile.catalogue import attack
from tests.hostile.users import ANNE, BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest

CHAIN = """
import os, sys
for _ in range(100):
    if os.fork():
        os.wait()
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process_of(uid: int, *command: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of another user that lives until the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env=environment, user=uid, group=uid, extra_groups=[], cwd="/"
    ) as process:
        try:
            yield process
        finally:
            process.communicate(b"")


def lease_of(uid: int, pid: int) -> Lease:
    holder = Holder(uid=uid, user=str(uid), pid=pid)
    return Lease(id="17-ab", holder=holder, shares=(Share(device_id="G0"),), since=0.0)


@attack(
    "name another user's lease in one's own environment, to hide memory behind it",
    now="harmless: it is shown as a foreign process",
)
def test_environment_names_anothers_lease() -> None:
    with process_of(BEN, "/bin/cat", **{LEASE_VARIABLE: "17-ab"}) as process:
        assert LeaseFinder([lease_of(BEN, 1)]).find(process.pid) != []
        assert LeaseFinder([lease_of(ANNE, 1)]).find(process.pid) == []


@attack(
    "use a GPU from the end of a chain of 100 processes, so that looking for its lease takes long",
    now="bounded: 64 ancestors are looked at",
)
@pytest.mark.usefixtures("unmeasured")  # measuring coverage takes twice as long after each fork
def test_long_chain_of_processes() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, "-c", CHAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        last = int(first.stdout.readline())
        assert LeaseFinder([lease_of(os.getuid(), first.pid)]).find(last) == []
        first.communicate(b"")


@attack("give a GPU process a name of control characters", now="harmless: they are escaped")
def test_process_name() -> None:
    code = "open('/proc/self/comm', 'w').write('\\x1b[2J\\n'); print(flush=True); import sys; sys.stdin.read()"
    with subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        device = Device(id="G0", vendor=Vendor.NVIDIA, processes=(Process(pid=process.pid),))
        (foreign,) = find_foreign_processes(device, ())
        assert foreign.process.name is not None
        assert foreign.process.name.isprintable()
        assert (describe_processes([process.pid])[process.pid].command or "").isprintable()
        process.communicate(b"")


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@attack("read the memory and the open files of another user's daemon and jobs", now="refused")
def test_read_memory(queue: QueueUnderTest) -> None:
    queue.start_gated()
    assert queue.daemon is not None
    for pid in (queue.daemon.pid, *queue.processes()):
        for name in ("mem", "maps"):
            with pytest.raises(PermissionError):
                act_as(BEN, read, f"/proc/{pid}/{name}")
        with pytest.raises(PermissionError):
            act_as(BEN, os.listdir, f"/proc/{pid}/fd")


def try_everything(home: str) -> dict[str, str]:
    """Return what the kernel says to each attempt to use the files of another user's queue."""
    names = ("queue.db", "daemon.log", "daemon.lock", "logs", "config.toml", "web.token")
    deeds: dict[str, Callable[[], object]] = {f"read {name}": partial(read, f"{home}/{name}") for name in names}
    deeds |= {
        "list": lambda: os.listdir(home),
        "remove": lambda: os.unlink(f"{home}/queue.db"),
        "add a file": lambda: Path(home, "config.toml").write_text("x"),
        "rename": lambda: os.rename(home, f"{home}-mine"),
        "replace": lambda: os.rmdir(home),
    }
    said = {}
    for name, deed in deeds.items():
        try:
            deed()
            said[name] = "done"
        except OSError as error:
            said[name] = type(error).__name__
    return said


@attack("read, list, remove, replace or add to the files of another user's queue", now="refused")
def test_files_of_the_queue(own_home: Path, queue: QueueUnderTest) -> None:
    queue.submit("true")
    own_home.parent.chmod(0o1777)
    said = act_as(BEN, try_everything, str(own_home))
    assert set(said.values()) == {"PermissionError"}, said


@attack("read the log of another user's job", now="refused")
def test_job_log(own_home: Path, queue: QueueUnderTest) -> None:
    job = queue.shell("echo secret")
    queue.wait(job)
    assert "secret" in queue.log_of(job)
    logs = [path for path in (own_home / "logs").rglob("*") if path.is_file()]
    assert logs
    for path in logs:
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(PermissionError):
            act_as(BEN, read, str(path))


@attack("run a job under a loose umask, so that its files can be read", now="refused: files are private")
def test_loose_umask(own_home: Path, queue: QueueUnderTest) -> None:
    before = os.umask(0)
    try:
        queue.restart()
        queue.wait(queue.shell("true"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in own_home.rglob("*") if path.is_file()}
    assert "queue.db" in modes
    assert {name: mode for name, mode in modes.items() if mode & 0o077 and not name.endswith(".share")} == {}


def attach(pid: int) -> str:
    """Try to attach a debugger."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.ptrace(16, pid, None, None) < 0 else "attached"


@attack("attach a debugger to another user's daemon", now="refused")
def test_debugger(queue: QueueUnderTest) -> None:
    queue.submit("true")
    assert queue.daemon is not None
    assert act_as(BEN, attach, queue.daemon.pid) == "Operation not permitted"
