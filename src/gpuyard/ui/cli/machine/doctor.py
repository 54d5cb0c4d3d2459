"""`gpuyard doctor`: which probes work, which do not, and what to do about it; and the replay of saved outputs."""

import os
import platform
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from gpuyard import __version__
from gpuyard.errors import ProbeError, UserError
from gpuyard.probes.replay_output import TOOLS
from gpuyard.ui.cli.rich_output import console, deadline_option, json_option, print_json

if TYPE_CHECKING:
    from gpuyard.core.snapshot import Vendor
    from gpuyard.engines.registry import Checked
    from gpuyard.probes.check_probes import Checkup


@click.group("doctor", invoke_without_command=True)
@json_option
@deadline_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, deadline_s: float) -> int | None:  # noqa: FBT001
    """Say which probes and engines work, which do not, and what to do about it.

    Exit status 1 where a GPU is plugged in that no probe can read, one is unhealthy, or an engine cannot be loaded.
    """
    if ctx.invoked_subcommand is not None:
        return None
    from gpuyard.engines.registry import check_engines
    from gpuyard.probes.check_probes import check_probes
    from gpuyard.probes.common.pci_gpus import gpus_on_pci
    from gpuyard.probes.local_machine import local_probes

    checks = check_probes(local_probes(), deadline_s)
    plugged = gpus_on_pci()
    engines = list(check_engines())
    advice = _advice(checks, plugged) + [str(each.problem) for each in engines if each.problem and not each.is_absent]
    if as_json:
        print_json(_report(checks, plugged, engines, advice))
    else:
        _print_report(checks, engines, advice)
    return 1 if advice else 0


@command.command("replay")
@click.argument("tool", type=click.Choice(TOOLS), metavar="TOOL")
@click.argument("file", type=click.File("rb"))
@json_option
@click.pass_context
def replay_command(ctx: click.Context, tool: str, file: BinaryIO, as_json: bool) -> None:  # noqa: FBT001
    """Parse a saved output of TOOL as the probe would.

    \b
    TOOL is one of: nvidia-smi-xml nvidia-smi-csv nvidia-smi-apps rocm-smi amd-smi radeontop intel_gpu_top xpu-smi
    powermetrics ioreg. FILE may be - for standard input.
    """
    from gpuyard.probes.replay_output import replay

    try:
        snapshot = replay(tool, file.read())
    except ProbeError as error:
        raise UserError(f"{file.name} cannot be read as {tool}: {error.message}") from error
    if as_json or (ctx.parent and ctx.parent.params["as_json"]):
        from gpuyard.core.snapshot_json import snapshot_as_dict

        print_json(snapshot_as_dict(snapshot))
        return
    from gpuyard.ui.views.device_tables import snapshot_view

    out = console()
    out.print(snapshot_view(snapshot, out))


def _advice(checks: "list[Checkup]", plugged: "dict[str, Vendor]") -> list[str]:
    """What a person should do something about; nothing where all is well."""
    readable = {check.vendor for check in checks if check.devices}
    advice = []
    for bus_id, vendor in plugged.items():
        if vendor not in readable:
            advice.append(f"{vendor} GPU at {bus_id}: no probe can read it")
    for check in checks:
        advice += [f"{device.name or device.id} is unhealthy: {device.fault}"
                   for device in check.devices or () if not device.healthy]  # fmt: skip
        if check.vendor not in readable:
            advice += [str(problem) for problem in check.problems if problem.kind != "missing"]
    return list(dict.fromkeys(advice))


def _settings() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("GPUYARD_")}


def _report(
    checks: "list[Checkup]", plugged: "dict[str, Vendor]", engines: "list[Checked]", advice: list[str]
) -> dict[str, Any]:
    from gpuyard.core.snapshot_json import problem_as_dict

    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings": _settings(),
        "probes": [
            {
                "vendor": str(check.vendor),
                "name": check.probe,
                "works": check.works,
                "devices": None if check.devices is None else len(check.devices),
                "seconds": round(check.seconds, 4),
                "problems": [problem_as_dict(problem) for problem in check.problems],
            }
            for check in checks
        ],
        "pci": [{"bus_id": bus_id, "vendor": str(vendor)} for bus_id, vendor in plugged.items()],
        "engines": [{"name": each.name, "works": each.problem is None, "problem": each.problem} for each in engines],
        "advice": advice,
        "healthy": not advice,
    }


def _print_report(checks: "list[Checkup]", engines: "list[Checked]", advice: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(f"gpuyard {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for name, value in _settings().items():
        out.print(f"{name}={value}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("vendor", "probe", "result"):
        table.add_column(heading, no_wrap=heading != "result", overflow="fold")
    last = None
    for check in checks:
        table.add_row(str(check.vendor) if check.vendor != last else "", check.probe, _result(check))
        last = check.vendor
    for number, engine in enumerate(engines):
        style = "green" if engine.problem is None else "dim" if engine.is_absent else "yellow"
        table.add_row("engines" if not number else "", engine.name, Text(engine.problem or "can be used", style=style))
    out.print(table)
    for line in advice:
        out.print(Text.assemble(("! ", "bold yellow"), line))
    if not advice:
        found = any(check.devices for check in checks)
        out.print("Nothing is wrong." if found else "No GPU is plugged in, and nothing is wrong with that.")


def _result(check: "Checkup") -> Any:
    from rich.text import Text

    notes = [f"{problem.message}{f' ({problem.hint})' if problem.hint else ''}" for problem in check.problems]
    if check.devices is not None:
        count = f"{len(check.devices)} device{'' if len(check.devices) == 1 else 's'}"
        return Text.assemble(("works", "green"), "; ".join([f": {count} in {check.seconds * 1000:.1f} ms", *notes]))
    is_absent = all(problem.kind == "missing" for problem in check.problems)
    return Text("; ".join(notes), style="dim" if is_absent else "yellow")
