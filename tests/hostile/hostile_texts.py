"""Texts of another user that the victim's commands and pages show: terminal escapes, line ends, markup, length."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory
from gpuyard.system.processes import this_process
from tests.hostile.ledger_attacks import ben_holds, record
from tests.unit.ledger import DEADLINE_S, nothing

# Sets the window's title, a colour (C1), reverses the direction of writing, forges a line, and is markup for rich.
NASTY = "\x1b]0;PWNED\x07\x9b31m\u202e\nFORGED: [bold red]line[/bold red] <b>x</b>"
SHOWN = "\\x1b]0;PWNED\\x07\\x9b31m\\u202e\\nFORGED: [bold red]line[/bold red] <b>x</b>"
FORBIDDEN = (b"\x1b]0;PWNED", "\x9b".encode(), "\u202e".encode(), b"\nFORGED")
LONG = "y" * 120_000
USE_GPU = """
import sys
from gpuyard.probes.simulated_devices import SimulatedUse
use = SimulatedUse()
use.allocate("SIM-1", 20000)
use.set_load("SIM-1", 90)
open("/proc/self/comm", "w").write("\\x1b]0;PWNED\\x07")
print("ready", flush=True)
sys.stdin.read()
"""


def check_bytes(shown: bytes, about: str) -> None:
    found = [each for each in FORBIDDEN if each in shown]
    assert not found, (about, found, shown[:2000])
    assert all(len(line) < 4000 for line in shown.splitlines()), about


def check_strings(value: Any, about: str) -> None:
    """Check all texts of a decoded JSON document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_strings(name, about)
            check_strings(inner, f"{about}.{name}")
    elif isinstance(value, list):
        for inner in value:
            check_strings(inner, about)
    elif isinstance(value, str):
        assert not any(each.decode() in value for each in FORBIDDEN), (about, value[:300])


@contextlib.contextmanager
def foreign_process() -> Iterator[int]:
    """A process without a lease on SIM-1, whose name and command line are hostile."""
    # Through a shell, as tests start Python in a process that has imported gpuyard.
    command = ["/bin/sh", "-c", 'exec "$0" "$@"', sys.executable, "-c", USE_GPU, NASTY, LONG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.communicate(b"")


@pytest.fixture(name="own_home")
def make_own_home(own_home: Path) -> Path:
    """The folder of the victim's queue, whose ledger is shared."""
    own_home.mkdir(mode=0o700)
    folder = make_shared_directory(own_home.parent / "ledger")
    Ledger(folder).claim(this_process(), nothing, DEADLINE_S)
    return own_home


@pytest.fixture(name="hostile_texts")
def make_hostile_texts(own_home: Path) -> Iterator[None]:
    """Ben's lease of SIM-0, ticket and invalid files, and a process on SIM-1; each with hostile text."""
    folder = own_home.parent / "ledger"
    files = [
        ("1-0.lease", record([{"device_id": "SIM-0"}], label=NASTY, user=NASTY)),
        ("1-1.ticket", record(need={"devices": 2}, label=NASTY, boot_id="x")),
        (f"2-0{NASTY.replace('/', '_')}.lease", record([{"device_id": "SIM-0"}])),
        ("3-0.lease", record([{"device_id": NASTY}])),
        ("4-0.ticket", record(need={"only": [NASTY], "model": NASTY})),
    ]
    with ben_holds(folder, *files), foreign_process():
        yield
