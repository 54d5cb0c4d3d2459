"""The names of the processes that started a command, up to the leader of its session."""

import os
import subprocess
import sys

from gpuyard.system.submitting_shell import starting_processes

PRINT = "from gpuyard.system.submitting_shell import starting_processes; print(*starting_processes())"


def names_in(*command: str, **options: bool) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90, **options)  # type: ignore[call-overload]
    return str(done.stdout).split()


def test_the_nearest_process_is_first_and_this_one_only_on_request() -> None:
    own = starting_processes(with_own=True)
    assert f":{os.getpid()}:" in own[0]
    assert starting_processes() == own[1:]
    assert names_in(sys.executable, "-c", PRINT)[: len(own)] == own


def test_the_chain_ends_with_the_leader_of_the_session() -> None:
    names = names_in("/bin/sh", "-c", f'echo $$; {sys.executable} -c "{PRINT}"; :', start_new_session=True)
    assert [name.split(":")[1] for name in names[1:]] == [names[0]]
