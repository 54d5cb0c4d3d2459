"""Scripts of `gpuyard export`, to be run where they are meant for."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.queue_command import run

STRANGE = ("a  b", "$HOME", "it's", '"q"', "new\nline\nEND", "\\back", "*")
SAY = "printf '<%s>' \"$@\" > said.part; mv said.part said"
SAID = "".join(f"<{word}>" for word in STRANGE)


def play(site: str, folder: Path, **environment: str) -> str:
    """What the script says."""
    exported = run("export", site, str(folder / "script"))
    assert exported.returncode == 0, exported.stderr
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": own, **environment}
    done = subprocess.run(
        [str(folder / "script")], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
