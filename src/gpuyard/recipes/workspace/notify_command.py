"""Run a workspace's `notify` command when all submitted tasks have finished. This module runs as a job of the queue.

The command gets GPUYARD_WORKSPACE, GPUYARD_TASK_NAME, and GPUYARD_SUMMARY, a sentence, in its environment.
"""

import os
import subprocess
import sys
from pathlib import Path

from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import GpuyardError
from gpuyard.recipes.workspace.settings import load
from gpuyard.recipes.workspace.sweep_status import SweepStatus, read_sweep_status


def _summarize(status: SweepStatus) -> str:
    facts = [f"{status.completed} of {status.total} completed"]
    if status.failed:
        facts.append(f"{status.failed} failed")
    if status.not_started:
        facts.append(f"{status.not_started} not done")
    return ", ".join(facts)


def main() -> None:
    workspace, config_file = map(Path, sys.argv[1:3])
    try:
        loaded = load(workspace, config_file)
        with RetryingClient() as queue:
            summary = _summarize(read_sweep_status(loaded, queue))
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    environment = {
        **os.environ,
        "GPUYARD_WORKSPACE": str(workspace),
        "GPUYARD_TASK_NAME": loaded.settings.task_name,
        "GPUYARD_SUMMARY": summary,
    }
    sys.exit(subprocess.run(loaded.settings.notify or ("true",), env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
