"""What a process announces, without other users; those are in tests/hostile/test_neighbours.py."""

import os
import tempfile
from pathlib import Path

import pytest

from gpuyard.ledger import neighbours
from gpuyard.ledger.neighbours import listening_sockets

pytestmark = pytest.mark.linux("abstract sockets")


def test_a_process_announces_only_the_newest_of_many_directories() -> None:
    with tempfile.TemporaryDirectory(prefix="gy") as scratch:  # a short path: names of sockets are cut off
        for number in range(neighbours._MOST_ANNOUNCED + 4):
            folder = Path(scratch, str(number))
            folder.mkdir()
            neighbours.announce(folder)
            neighbours.announce(folder)
        listed = [name.decode() for name, uid in listening_sockets() if uid == os.geteuid()]
    numbers = range(neighbours._MOST_ANNOUNCED + 4)
    found = [number for number in numbers if any(name.endswith(f"{scratch}/{number}") for name in listed)]
    assert found == list(range(4, neighbours._MOST_ANNOUNCED + 4))
