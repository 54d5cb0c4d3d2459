"""Slurm on loopback, for one run: its own munge, controller and node daemon."""

import contextlib
import getpass
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gflow import free_port
from bench.work import Tool, Work, serving

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIG = """\
ClusterName=bench
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd.pid
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MailProg=/bin/true
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_port} CPUs={slots} RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def slurm_tool() -> Tool:
    return Tool(
        name="Slurm",
        run=_slurm,
        is_installed=lambda: all(map(_find, _PROGRAMS)),
        install="apt-get install slurmctld slurmd slurm-client munge",
        jobs=50,
        hand_overs=10,
        note="state files",
    )


def _slurm(work: Work) -> float:
    with _cluster(work) as env:
        script = f"#!/bin/sh\n{shlex.join(work.command)}\n"
        started = time.perf_counter()
        work.call(["sbatch", f"--array=1-{work.count}", "--output=%a.log"], env, typed=script)
        # Slurm's own wait polls every few seconds; the file of ended jobs is faster.
        work.wait_until(lambda: _lines(work.folder / "ended") >= work.count, 0.01)
        return time.perf_counter() - started


@contextlib.contextmanager
def _cluster(work: Work) -> Iterator[dict[str, str]]:
    config = _configure(work)
    env = {"SLURM_CONF": str(config)}
    node = [_find("slurmd"), "-D", "-f", str(config), "-N", "n0"]
    with (
        serving(_munge(work.folder / "munge"), work),
        serving([_find("slurmctld"), "-D", "-c", "-f", str(config)], work, env),
        serving(node, work, env),
    ):
        work.wait_until(lambda: "idle" in work.call(["sh", "-c", "sinfo -h -o %T || :"], env), 0.1)
        yield env


def _configure(work: Work) -> Path:
    (work.folder / "state").mkdir()
    (work.folder / "spool").mkdir()
    config = work.folder / "slurm.conf"
    config.write_text(
        _CONFIG.format(
            user=getpass.getuser(),
            folder=work.folder,
            controller_port=free_port(),
            node_port=free_port(),
            slots=work.slots,
        )
    )
    return config


def _munge(folder: Path) -> list[str]:
    folder.mkdir(mode=0o700)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [_find("munged"), "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]


def _find(program: str) -> str:
    # The daemons are in directories that only root's PATH contains.
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
