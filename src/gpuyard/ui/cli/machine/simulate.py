"""`gpuyard simulate`: compares scheduling policies on a trace of jobs, in simulated time."""

from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import click

from gpuyard.core.units import format_duration
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.simulator.compare_policies import Compared, ComparisonRequest, compare
from gpuyard.simulator.schedule_metrics import PolicyMetrics
from gpuyard.simulator.timeline_picture import draw_timeline
from gpuyard.simulator.trace_file import write_trace
from gpuyard.system.results_file import write_results
from gpuyard.ui.cli.rich_output import json_option
from gpuyard.ui.cli.terminal import say_json
from gpuyard.ui.cli.text_table import Column, join_cells, lay_out


def _split_names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


@click.command("simulate")
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--mix", callback=_split_names, metavar="NAMES", help="Generate a random trace instead: lucid, carma or both."
)
@click.option("--jobs", type=click.IntRange(1), default=400, show_default=True, help="Number of jobs to generate.")
@click.option(
    "--rate", "per_hour", type=click.FloatRange(0, min_open=True), help="Jobs per hour. [twice what `fifo` could do]"
)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed generates the same trace.")
@click.option("--devices", default="4x24GB", show_default=True, metavar="SPEC", help="Such as 1x80GB,2x24GB.")
@click.option(
    "--policy", "policies", callback=_split_names, default="fifo,declared,gpuyard", show_default=True, metavar="NAMES",
    help="Policies to compare.",
)  # fmt: skip
@click.option(
    "--passes", type=click.IntRange(1), default=2, show_default=True, help="Number of times to run the trace."
)
@click.option("--quantum", "quantum_s", type=click.FloatRange(0),
              help="Longest simulated step in seconds. [depends on the number of jobs]")  # fmt: skip
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), envvar="GPUYARD_TRACES",
              help="Directory of measured programs and pairs. [GPUYARD_TRACES]")  # fmt: skip
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the trace to this file.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the last pass to FILE.svg or FILE.png."
)
@json_option
def command(*, save: Path | None, picture: Path | None, as_json: bool, **request: Any) -> None:
    """Run a trace of jobs through the queue in simulated time, and compare policies.

    TRACE is a CSV file of jobs; docs/how-to/compare-policies.md describes its format.
    """
    if (request["trace"] is None) == (not request["mix"]):
        raise UserError("give a trace, or generate one with --mix", hint="such as gpuyard simulate --mix lucid")
    if picture is not None:
        _check_ending(picture)
    compared = compare(ComparisonRequest(**request))
    if save is not None:
        trace = StringIO(newline="")
        write_trace(compared.jobs, trace)
        write_results(str(save), trace.getvalue().encode())
    if picture is not None:
        _draw(compared, picture)
    if as_json:
        say_json(compared.as_dict())
    else:
        _print(compared)


def _print(compared: Compared) -> None:
    bound = compared.bound
    click.echo(f"{len(compared.jobs):,} jobs on {compared.devices}")
    if compared.too_large:
        needs = "job that needs" if compared.too_large == 1 else "jobs that need"
        click.echo(f"left out: {compared.too_large:,} {needs} more than these GPUs have")
    if compared.never_ran:
        click.echo(f"left out: {compared.never_ran:,} pods that used no GPU or never ran")
    click.echo(f"lower bound on the makespan: {format_duration(bound.makespan_s)}, by {bound.reason}\n")
    rows = [_row(figures) for figures in compared.figures]
    columns = [Column(heading.strip(), is_right=heading != "policy") for heading in rows[0]]
    table = lay_out(columns, [list(row.values()) for row in rows], None)
    click.echo("\n".join(map(join_cells, table)))


def _row(figures: PolicyMetrics) -> dict[str, str]:
    return {
        "policy": figures.policy,
        "pass": str(figures.pass_number),
        "makespan": _short(figures.makespan_s),
        "/bound": f"{figures.over_bound:.2f}",
        "wait": _short(figures.mean_wait_s),
        "p99": _short(figures.p99_wait_s),
        "done": _short(figures.mean_completion_s),
        "p99 ": _short(figures.p99_completion_s),
        "gpu%": f"{figures.compute_percent:.0f}",
        "mem%": f"{figures.memory_percent:.0f}",
        "oom": str(figures.out_of_memory),
        "lost": str(figures.lost),
        "paused": _short(figures.preempted_s),
    }


def _short(seconds: float) -> str:
    """Return the duration in one unit, so that thirteen columns fit a narrow terminal."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f}{unit}"
    return f"{abs(seconds):.0f}s"


def _check_ending(path: Path) -> None:
    """Raise for an unsupported picture format before the simulation, which may take long."""
    ending = path.suffix.lower()
    if ending not in {".svg", ".png"}:
        raise UserError(f"a picture is drawn as SVG or PNG, not as '{path.name}'", hint="name it FILE.svg")
    if ending == ".png" and find_spec("cairosvg") is None:
        raise EnvironmentFault("PNG pictures need the package cairosvg", hint="name the picture FILE.svg")


def _draw(compared: Compared, path: Path) -> None:
    best = min(panel.metrics.makespan_s for panel in compared.last)
    title = f"{len(compared.jobs):,} jobs on {compared.devices}, done in {format_duration(best)}"
    picture = draw_timeline(compared.last, title).encode()
    if path.suffix.lower() == ".png":
        picture = import_module("cairosvg").svg2png(bytestring=picture)
    write_results(str(path), picture)
