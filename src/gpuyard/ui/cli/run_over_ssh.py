"""Runs the command on the machine that has the queue, over ssh, if `[queue] reach = "ssh"` says so.

The command gets the same arguments, folder and terminal there, and uses the gpuyard installation that runs the daemon.
From the environment it gets only the variables that say where gpuyard's files are.
"""

import os
import shlex
import sys

from gpuyard.client.queue_host import QueueElsewhere, QueueHost
from gpuyard.config import load_config
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.ui.cli.terminal import note

# Set on the other machine, so that a command is never passed on twice.
_CAME_FROM = "GPUYARD_CAME_FROM"
_PASSED_ON = ("GPUYARD_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


def pass_on(error: GpuyardError, arguments: list[str]) -> None:
    """Replace this process by ssh to the machine of the queue. Return if the configuration does not say so."""
    is_refused = arguments[:1] == ["uninstall"] or os.environ.get(_CAME_FROM)
    if not isinstance(error, QueueElsewhere) or is_refused or load_config().queue.reach != "ssh":
        return
    is_terminal = os.isatty(0) and os.isatty(1)
    if is_terminal:
        note(f"gpuyard: on {error.host.host}, over ssh")
    sys.stdout.flush()
    try:
        os.execvp("ssh", ssh_command(error.host, arguments, is_terminal=is_terminal))  # noqa: S606 - the program is ssh
    except OSError as problem:
        raise EnvironmentFault(
            f"{error}; ssh cannot be started: {problem.strerror}", hint="install it, or remove `reach` from config.toml"
        ) from problem


def ssh_command(host: QueueHost, arguments: list[str], *, is_terminal: bool) -> list[str]:
    """Return the ssh command. The other machine's shell parses its last argument."""
    variables = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    settings = [f"{name}={value}" for name, value in {**variables, _CAME_FROM: os.uname().nodename}.items()]
    there = shlex.join(["env", *settings, *host.program, *arguments])
    terminal = ["-t"] if is_terminal else []
    return ["ssh", *terminal, "--", host.address, f"cd {shlex.quote(os.getcwd())} && exec {there}"]
