"""`gpuyard simulate`: compares scheduling policies on a trace of jobs, in simulated time."""

import os
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_duration
from gpuyard.policy.plan import read_world
from gpuyard.simulator.compare_policies import Compared, ComparisonRequest, compare, plan_lines
from gpuyard.simulator.schedule_metrics import PolicyMetrics
from gpuyard.simulator.timeline_picture import draw_timeline
from gpuyard.simulator.traces import write_trace
from gpuyard.system.write_files import write_results
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Typed, Verb
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.text_table import Column, clean, join_cells, lay_out

VERB = Verb(
    """Run a trace of jobs through the queue in simulated time, and compare policies.

    TRACE is a CSV file of jobs; docs/how-to/compare-policies.md describes its format. `replay FILE` decides again what
    `gpuyard why --export FILE` wrote, and says which jobs start and why others wait.
    """,
    (
        Option("mix", "text", "NAMES", "Generate a random trace instead: lucid, carma or both."),
        Option("jobs", "whole", "N", "Number of jobs to generate.", default="400", least=1),
        Option("rate", "number", "N", "Jobs per hour.", note="twice what `fifo` could do", least=0.01),
        Option("seed", "whole", "S", "The same seed generates the same trace.", default="1"),
        Option("devices", "text", "SPEC", "Such as 1x80GB,2x24GB.", default="4x24GB"),
        Option("policy", "text", "NAMES", "Policies to compare.", default="fifo,declared,gpuyard"),
        Option("passes", "whole", "N", "Number of times to run the trace.", default="2", least=1),
        Option("quantum", "number", "S", "Longest simulated step in seconds.", note="depends on the number of jobs"),
        Option("traces", "text", "DIRECTORY", "Directory of measured programs and pairs.", note="GPUYARD_TRACES"),
        Option("save", "text", "FILE", "Write the trace to this file."),
        Option("picture", "text", "FILE", "Draw the last pass to FILE.svg or FILE.png."),
        JSON,
    ),
    Arguments("[TRACE | replay FILE]", least=0, most=2),
)


def _replay(typed: Typed, path: str) -> int:
    file = read_world((_existing(path, "FILE") or Path(path)).read_bytes())
    if all(each.lane.id != file.lane for each in file.world.lanes):
        hint = "to ask about another job, change `job_id` and `lane` together"
        raise UserError(f"this world has no lane {file.lane}", hint=hint)
    plan = file.decide()
    if typed.flag("json"):
        say_json(to_builtins(plan))
    else:
        say(*map(clean, plan_lines(file, plan)))
    return 0


def run(typed: Typed) -> int:
    values = typed.values()
    if len(typed.arguments) == 2:
        word, path = typed.arguments
        if word != "replay":
            hint = "or `gpuyard simulate replay FILE`"
            raise UserError(f"simulate takes one trace, not '{word}' and '{path}'", hint=hint)
        return _replay(typed, path)
    request: dict[str, Any] = {
        "trace": _existing(next(iter(typed.arguments), None), "TRACE"),
        "mix": _split_names(values["mix"]),
        "per_hour": values["rate"],
        "policies": _split_names(values["policy"]),
        "quantum_s": values["quantum"],
        "traces": _existing(values["traces"] or os.environ.get("GPUYARD_TRACES"), "--traces"),
        **{name: values[name] for name in ("jobs", "seed", "devices", "passes")},
    }
    picture = Path(values["picture"]) if values["picture"] else None
    if (request["trace"] is None) == (not request["mix"]):
        raise UserError("give a trace, or generate one with --mix", hint="such as gpuyard simulate --mix lucid")
    if picture is not None and picture.suffix.lower() not in {".svg", ".png"}:
        raise UserError(f"a picture is drawn as SVG or PNG, not as '{picture.name}'", hint="name it FILE.svg")
    if picture is not None and picture.suffix.lower() == ".png" and find_spec("cairosvg") is None:
        raise EnvironmentFault("PNG pictures need the package cairosvg", hint="name the picture FILE.svg")
    compared = compare(ComparisonRequest(**request))
    if values["save"] is not None:
        trace = StringIO(newline="")
        write_trace(compared.jobs, trace)
        write_results(values["save"], trace.getvalue().encode())
    if picture is not None:
        _draw(compared, picture)
    if typed.flag("json"):
        say_json(compared.as_dict())
    else:
        _print(compared)
    return 0


def _split_names(names: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (names or "").split(",") if word.strip())


def _existing(path: str | None, what: str) -> Path | None:
    if path is not None and not os.path.exists(path):
        raise UserError(f"{what}: there is no '{path}'", hint="name one that exists")
    return None if path is None else Path(path)


def _print(compared: Compared) -> None:
    say(f"{len(compared.jobs):,} jobs on {compared.devices}")
    if compared.too_large:
        needs = "job that needs" if compared.too_large == 1 else "jobs that need"
        say(f"left out: {compared.too_large:,} {needs} more than these GPUs have")
    if compared.never_ran:
        say(f"left out: {compared.never_ran:,} pods that used no GPU or never ran")
    bound = compared.bound
    say(f"lower bound on the makespan: {format_duration(bound.makespan_s)}, by {bound.reason}", "")
    rows = [_row(figures) for figures in compared.figures]
    columns = [Column(heading.strip(), is_right=heading != "policy") for heading in rows[0]]
    say(*map(join_cells, lay_out(columns, [list(row.values()) for row in rows], None)))


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


def _draw(compared: Compared, path: Path) -> None:
    best = min(panel.metrics.makespan_s for panel in compared.last)
    title = f"{len(compared.jobs):,} jobs on {compared.devices}, done in {format_duration(best)}"
    picture = draw_timeline(compared.last, title).encode()
    if path.suffix.lower() == ".png":
        picture = import_module("cairosvg").svg2png(bytestring=picture)
    write_results(str(path), picture)
