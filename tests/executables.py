"""Programs that a test writes and runs."""

import os
import subprocess
from pathlib import Path


def write_executable(path: Path, text: str) -> Path:
    """Write a program, also in place of another, that can be executed at once.

    Another process writes it. While this process had it open, a thread that starts a program would pass the descriptor
    on, and nothing can execute the file until that program has closed it: "Text file busy".
    """
    command = ["/bin/sh", "-c", 'cat > "$1"', "sh", str(path)]
    subprocess.run(command, input=text.encode(), env={"PATH": os.defpath}, check=True)
    path.chmod(0o755)
    return path
