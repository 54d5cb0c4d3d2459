"""`gpuyard devices`: what is there, and how busy it is."""

import click

from gpuyard.ui.cli.output import console, deadline_option, json_option, print_json


@click.command("devices")
@json_option
@deadline_option
def command(as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show every GPU and the host, and how busy they are."""
    from gpuyard.probes.local import snapshot as look

    snapshot = look(deadline_s)
    if as_json:
        from gpuyard.core.shape import snapshot_as_dict

        print_json(snapshot_as_dict(snapshot))
        return
    from gpuyard.probes.pci import vendors_on_pci
    from gpuyard.ui.tables import snapshot_view

    out = console()
    out.print(snapshot_view(snapshot, out, vendors_on_pci()))
