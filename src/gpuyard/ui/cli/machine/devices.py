"""`gpuyard devices`: every GPU and the host, and their load."""

import click

from gpuyard.core.snapshot_json import snapshot_as_dict
from gpuyard.probes.common.kernel_files import vendors_on_pci
from gpuyard.probes.common.process_info import describe_processes
from gpuyard.probes.local_machine import snapshot as take_snapshot
from gpuyard.ui.cli.rich_output import deadline_option, frame, json_option, pids_of
from gpuyard.ui.cli.terminal import say_json, say_lines
from gpuyard.ui.views.device_tables import snapshot_lines


@click.command("devices")
@json_option
@deadline_option
def command(as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show every GPU and the host, and their load."""
    snapshot = take_snapshot(deadline_s)
    if as_json:
        say_json(snapshot_as_dict(snapshot))
        return
    processes = describe_processes(pids_of(snapshot))
    say_lines(snapshot_lines(snapshot, frame(), expected=vendors_on_pci(), processes=processes))
