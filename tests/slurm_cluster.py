"""A real Slurm on loopback, for tests: munge, a controller and two nodes with two GPUs each, without root or systemd.

All of it runs as the user of the tests, as children of this process, and is ended by pid. GPUs are character devices
that every machine has, so that Slurm allocates them as it would allocate cards. Slurm looks for work once a second,
and cannot be made to do it more often; a cancelled job that keeps running is killed after `KILL_WAIT_S`.
"""

import contextlib
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.free_ports import free_ports

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system over a folder")
needs_slurm = pytest.mark.needs("munged", "slurmctld", "slurmd", "sbatch")
NODES = {"n0": ("/dev/null", "/dev/zero"), "n1": ("/dev/full", "/dev/random")}
SHARDS_PER_CARD = 24
MAX_ARRAY_SIZE = 2001
KILL_WAIT_S = 5  # the least that Slurm accepts
_LIMIT_S = 60.0
_CONFIGURATION = """\
ClusterName=gpuyard
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu,shard
ReturnToService=2
MaxArraySize={array}
MaxJobCount=20000
MinJobAge=300
KillWait={kill_wait}
SlurmdTimeout=60
SlurmctldTimeout=10
MailProg=/bin/true
NodeName=DEFAULT CPUs=8 RealMemory=10000 Gres=gpu:fake:2,shard:{shards}
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class SlurmCluster:
    """A cluster that runs while its `with` block does; `environment` holds the variables of its clients. Commands
    give up on a controller that does not answer after 3 s (default: 9 s)."""

    def __init__(self, folder: Path, *, limits_memory: bool = False) -> None:
        """With `limits_memory`, jobs are ended once they use more than their `--mem`, as at sites without cgroups."""
        self._limits_memory = limits_memory
        self.environment = {"SLURM_CONF": f"{folder}/client.conf"}
        self._daemons_environment = {"SLURM_CONF": f"{folder}/slurm.conf"}  # for jobs too
        self._folder = folder
        self._ports = free_ports(1 + len(NODES))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._spawn("munged", "munged", "--foreground", "--force", *self._munge_options())
            self._wait_for("munged", (self._folder / "munge" / "sock").exists)
            self.start_controller()
            for node in NODES:
                self._spawn_node(node)
            for node in NODES:
                self._wait_for_node(node)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of its processes and jobs."""
        for node in NODES:
            self._kill_daemon_and_jobs(node)
        for name in ("slurmctld", "munged"):
            self._end(name, psutil.Process.kill)

    def start_controller(self) -> None:
        self._spawn("slurmctld", "slurmctld", "-D")
        self._wait_for("slurmctld", lambda: _is_answering(self._ports[0]))

    def stop_controller(self) -> None:
        """Stop it cleanly: it keeps its state, and jobs go on."""
        self._end("slurmctld", psutil.Process.terminate)

    def start_node(self, node: str) -> None:
        self._spawn_node(node)
        self._wait_for_node(node)

    @contextlib.contextmanager
    def hiding(self, folder: Path, node: str) -> Iterator[None]:
        """For the time of the block, the node sees an empty folder in place of this one. Only root can do that."""
        self.kill_node(node)
        try:
            self._spawn(node, *hidden_from(folder, "slurmd", "-D", "-N", node))
            self._wait_for_node(node)
            yield
        finally:
            self.kill_node(node)
            self.start_node(node)

    def kill_node(self, node: str) -> None:
        """Kill all that runs there at once, as a power failure would, and mark the node as down: the controller's own
        timeout is so high that a busy machine does not reach it by accident."""
        self._kill_daemon_and_jobs(node)
        self._ask("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def set_nodes(self, state: str) -> None:
        self._ask("scontrol", "update", f"nodename={','.join(NODES)}", f"state={state}", "reason=test")

    def suspend(self, job: str) -> None:
        self._ask("scontrol", "suspend", job)

    def resume(self, job: str) -> None:
        self._ask("scontrol", "resume", job)

    def add_partition(self, name: str) -> None:
        self._ask("scontrol", "create", f"partitionname={name}", "nodes=ALL")

    def remove_partition(self, name: str) -> None:
        self._ask("scontrol", "delete", f"partitionname={name}")

    def _write_files(self) -> None:
        for name in ("munge", "state", "log", *(f"spool.{node}" for node in NODES)):
            (self._folder / name).mkdir(mode=0o700)
        key = self._folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        configuration = _CONFIGURATION.format(
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=self._folder,
            ports=self._ports,
            array=MAX_ARRAY_SIZE,
            kill_wait=KILL_WAIT_S,
            shards=2 * SHARDS_PER_CARD,
        )
        if self._limits_memory:
            configuration = configuration.replace("CR_Core\n", "CR_Core_Memory\nDefMemPerNode=1000\n").replace(
                "jobacct_gather/none",
                "jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill",
            )
        (self._folder / "slurm.conf").write_text(configuration)
        (self._folder / "client.conf").write_text(f"{configuration}MessageTimeout=4\n")
        (self._folder / "gres.conf").write_text("".join(_cards_of(node) for node in NODES))

    def _munge_options(self) -> Iterator[str]:
        for option, name in (("key", "key"), ("pid", "pid"), ("log", "log"), ("seed", "seed")):
            yield f"--{option}-file={self._folder}/munge/{name}"
        yield f"--socket={self._folder}/munge/sock"

    def _spawn_node(self, node: str) -> None:
        self._spawn(node, "slurmd", "-D", "-N", node)

    def _spawn(self, name: str, *command: str) -> None:
        self._daemons[name] = subprocess.Popen(
            command,
            env={**os.environ, **self._daemons_environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end(self, name: str, how: Callable[[psutil.Process], None]) -> None:
        """End the daemon and its children: the controller has a helper process."""
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        process = psutil.Process(daemon.pid)  # exists, if only as a zombie
        helpers = process.children(recursive=True)
        how(process)
        daemon.wait(_LIMIT_S)
        for child in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _kill_daemon_and_jobs(self, node: str) -> None:
        self._end(node, psutil.Process.kill)
        _wait(f"the end of {node}", lambda: not self._kill_all_on(node))

    def _kill_all_on(self, node: str) -> bool:
        """Return whether anything was running."""
        left = list(self._running_on(node))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(left)

    def _running_on(self, node: str) -> Iterator[psutil.Process]:
        """Yield step daemons, found by the log they write to, and the jobs' programs, found by their environment."""
        log = f"{self._folder}/log/slurmd.{node}.log"
        marks = {"SLURMD_NODENAME": node, **self._daemons_environment}
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.name() in {"slurmd", "slurmstepd"}:
                    found = log in {file.path for file in process.open_files()}
                else:
                    found = marks.items() <= process.environ().items()
                if found:
                    yield process

    def _wait_for(self, name: str, is_up: Callable[[], bool]) -> None:
        def is_up_or_dead() -> bool:
            status = self._daemons[name].poll()
            if status is not None:
                raise RuntimeError(f"{name} ended with status {status}: its log is in {self._folder}/log")
            return is_up()

        _wait(name, is_up_or_dead)

    def _wait_for_node(self, node: str) -> None:
        """Wait for the node's own port: the controller may not have noticed yet that the node was down."""
        port = self._ports[1 + list(NODES).index(node)]
        self._wait_for(node, lambda: _is_answering(port) and self._state_of(node) in {"idle", "mixed", "allocated"})

    def _state_of(self, node: str) -> str:
        return self._ask("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")

    def _ask(self, *arguments: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield one cluster for all tests of a process: each leaves no job running and every node up."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def hidden_from(folder: Path, *command: str) -> list[str]:
    """Return the command that runs this one where an empty file system covers the folder."""
    covered = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", covered, str(folder), *command]


def _cards_of(node: str) -> str:
    cards = [f"NodeName={node} Name=gpu Type=fake File={file}\n" for file in NODES[node]]
    return "".join(cards) + f"NodeName={node} Name=shard Count={len(cards) * SHARDS_PER_CARD}\n"


def _is_answering(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(what: str, is_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_up():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {_LIMIT_S:.0f} s")
        time.sleep(0.02)
