"""Runs the work with HyperQueue, and prints the seconds. Run by the interpreter that HyperQueue is installed for."""

import os
import sys
import time
from pathlib import Path

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig


def main(folder: Path, count: int, slots: int, command: list[str]) -> float:
    os.mkfifo(folder / "all-done")
    with LocalCluster(str(folder / "server"), WorkerConfig(cores=slots)) as cluster:
        client = cluster.client()
        started = time.perf_counter()
        job = Job()
        tasks = [
            job.program(command, stdout=str(folder / f"{number}.out"), stderr=str(folder / f"{number}.err"))
            for number in range(count)
        ]
        # HyperQueue's own wait polls once a second; an extra task that depends on all others reports the end at once.
        job.program(["sh", "-c", f"echo >{folder}/all-done"], deps=tasks)
        client.submit(job)
        (folder / "all-done").read_text()
        return time.perf_counter() - started


print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
