"""`gpuyard devices`: what is there, and how busy it is."""

import click

from gpuyard.ui.cli.rich_output import console, deadline_option, json_option, pids_of, print_json


@click.command("devices")
@json_option
@deadline_option
def command(as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show every GPU and the host, and how busy they are."""
    from gpuyard.probes.local_machine import snapshot as look

    snapshot = look(deadline_s)
    if as_json:
        from gpuyard.core.snapshot_json import snapshot_as_dict

        print_json(snapshot_as_dict(snapshot))
        return
    from gpuyard.probes.common.pci_gpus import vendors_on_pci
    from gpuyard.probes.common.process_info import describe_processes
    from gpuyard.ui.views.device_tables import Extras, snapshot_view

    out = console()
    extras = Extras(expected=vendors_on_pci(), people=describe_processes(pids_of(snapshot)))
    out.print(snapshot_view(snapshot, out, extras))
