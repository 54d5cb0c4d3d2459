"""A program that a test writes can be executed at once, whatever other threads start meanwhile."""

import subprocess
import sys
from pathlib import Path

from tests.executables import write_executable

# Prints which files this process itself has opened below its first argument.
_WRITE = """
import sys
from pathlib import Path
from tests.executables import write_executable

opened = []
place = sys.argv[1]
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(place) and opened.append(args[0]))
write_executable(Path(place, "program"), "#!/bin/sh\\necho it ran\\n")
print(opened)
"""


def test_the_process_that_runs_the_tests_never_has_the_program_open(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _WRITE, str(tmp_path)]
    opened = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert opened.stdout == "[]\n"
    assert subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout == "it ran\n"


def test_another_program_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a program"
    for status in (3, 4):
        assert subprocess.run([write_executable(path, f"#!/bin/sh\nexit {status}\n")], check=False).returncode == status
