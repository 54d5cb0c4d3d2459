"""Run scripts of `gpuyard export` on the cluster for which they were made."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.queue_command import run

SPECIAL_ARGUMENTS = ("a  b", "$HOME", "it's", '"q"', "new\nline\nEND", "\\back", "*")
PRINT_ARGUMENTS = "printf '<%s>' \"$@\" > printed.part; mv printed.part printed"
PRINTED = "".join(f"<{argument}>" for argument in SPECIAL_ARGUMENTS)


def run_exported(site: str, folder: Path, **environment: str) -> str:
    """Export the queue, run the script, and return its output."""
    exported = run("export", site, str(folder / "script"))
    assert exported.returncode == 0, exported.stderr
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": own, **environment}
    done = subprocess.run(
        [str(folder / "script")], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
