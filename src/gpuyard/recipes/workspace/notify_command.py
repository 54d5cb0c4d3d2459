"""What a workspace's `notify` is: a command that is run when what was started is over, as a job of the queue.

It is told how things stand in its environment: GPUYARD_WORKSPACE, GPUYARD_TASK_NAME, and GPUYARD_SUMMARY in words.
"""

import os
import subprocess
import sys
from pathlib import Path

from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import GpuyardError
from gpuyard.recipes.workspace.settings import load
from gpuyard.recipes.workspace.sweep_status import SweepStatus, standing_of


def summary_of(standing: SweepStatus) -> str:
    facts = [f"{standing.completed} of {standing.total} completed"]
    if standing.failed:
        facts.append(f"{standing.failed} failed")
    if standing.not_started:
        facts.append(f"{standing.not_started} not done")
    return ", ".join(facts)


def main() -> None:
    workspace, config_file = map(Path, sys.argv[1:3])
    try:
        loaded = load(workspace, config_file)
        with RetryingClient() as queue:
            summary = summary_of(standing_of(loaded, queue))
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    told = {
        "GPUYARD_WORKSPACE": str(workspace),
        "GPUYARD_TASK_NAME": loaded.settings.task_name,
        "GPUYARD_SUMMARY": summary,
    }
    words = loaded.settings.notify or ("true",)
    sys.exit(subprocess.run(words, env={**os.environ, **told}, check=False).returncode)


if __name__ == "__main__":
    main()
