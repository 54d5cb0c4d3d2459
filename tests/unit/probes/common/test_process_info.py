import os
import subprocess
import sys

from gpuyard.probes.devices_and_processes import describe_processes


def test_a_process_has_its_user_and_its_command_in_one_line() -> None:
    command = [sys.executable, "-c", "print(flush=True)\ninput()\nodd = '\x1b[31m'", "--lr", "3e-4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a process that is about to start has no command line for a moment
        info = describe_processes([process.pid])[process.pid]
        process.communicate(b"\n")
    assert info.command is not None
    assert info.command.startswith(f"{os.path.basename(sys.executable)} -c print(flush=True)\\ninput()\\nodd = ")
    assert info.command.endswith("--lr 3e-4")
    assert info.command.isprintable()
    assert info.user
    assert describe_processes([2**22 + 1]) == {}
