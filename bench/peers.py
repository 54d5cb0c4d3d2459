"""Other queues on the same work, each run as its manual recommends.

None of them is a dependency: a missing one is skipped, and the table says how to install it. Each gets its own folder
for its socket and state, so that a queue of the user is never touched.
"""

import os
import shlex
import shutil
import time
from pathlib import Path

from bench.gflow import gflow_tool
from bench.slurm import slurm_tool
from bench.work import Tool, Work

PEERS = Path(__file__).parents[1] / ".bench-peers"
_PIP = f"python3 -m venv {PEERS.name} && {PEERS.name}/bin/pip install"
_SUBMIT = 'i=0; while [ $i -lt "$COUNT" ]; do "$@" || exit; i=$((i+1)); done'
_SUBMIT_IN_TURN = 'i=0; while [ $i -lt "$COUNT" ]; do NQDIR=$((i % SLOTS)) nq -q "$@" || exit; i=$((i+1)); done'


def peers() -> list[Tool]:
    path = os.environ["PATH"]
    if str(PEERS / "bin") not in path.split(os.pathsep):
        os.environ["PATH"] = f"{path}{os.pathsep}{PEERS / 'bin'}"
    return [
        Tool(
            name="task-spooler (tsp)",
            run=_task_spooler,
            is_installed=lambda: shutil.which("tsp") is not None,
            install="apt-get install task-spooler",
            note="in memory",
        ),
        Tool(
            name="HyperQueue",
            run=_hyperqueue,
            is_installed=lambda: any(PEERS.glob("lib/python*/site-packages/hyperqueue")),
            install=f"{_PIP} hyperqueue",
            note="one submit, through its Python API; in memory",
        ),
        Tool(
            name="nq",
            run=_nq,
            is_installed=lambda: shutil.which("nq") is not None,
            install="apt-get install nq",
            note="a queue for each slot; files",
        ),
        Tool(
            name="simple_gpu_scheduler",
            run=_simple_gpu_scheduler,
            is_installed=lambda: shutil.which("simple_gpu_scheduler") is not None,
            install=f"{_PIP} simple_gpu_scheduler",
            note="no log for each job, nothing stored",
        ),
        gflow_tool(f"{_PIP} runqd; apt-get install tmux"),
        slurm_tool(),
    ]


def _task_spooler(work: Work) -> float:
    env = {
        "TS_SOCKET": str(work.folder / "socket"),
        "TMPDIR": str(work.folder),
        "TS_SLOTS": str(work.slots),
        "COUNT": str(work.count),
    }
    work.call(["tsp"], env)
    try:
        started = time.perf_counter()
        work.call(["sh", "-c", _SUBMIT, "sh", "tsp", *work.command], env)
        work.call(["tsp", "-w"], env)  # waits for the last job; one beside it may take a moment longer
        work.wait_until(lambda: not {"queued", "running"} & _tsp_states(work.call(["tsp", "-l"], env)), 0.001)
        return time.perf_counter() - started
    finally:
        work.call(["tsp", "-K"], env)


def _tsp_states(listing: str) -> set[str]:
    return {line.split()[1] for line in listing.splitlines()[1:]}


def _nq(work: Work) -> float:
    started = time.perf_counter()
    work.call(["sh", "-c", _SUBMIT_IN_TURN, "sh", *work.command], {"COUNT": str(work.count), "SLOTS": str(work.slots)})
    for queue in range(work.slots):
        work.call(["nq", "-w"], {"NQDIR": str(queue)})
    return time.perf_counter() - started


def _simple_gpu_scheduler(work: Work) -> float:
    commands = f"{shlex.join(work.command)}\n" * work.count
    started = time.perf_counter()
    work.call(["simple_gpu_scheduler", "--gpus", *map(str, range(work.slots))], typed=commands)
    return time.perf_counter() - started


def _hyperqueue(work: Work) -> float:
    script = Path(__file__).with_name("hyperqueue_run.py")
    printed = work.call(
        [str(PEERS / "bin/python"), str(script), str(work.folder), str(work.count), str(work.slots), *work.command]
    )
    return float(printed.splitlines()[-1])
