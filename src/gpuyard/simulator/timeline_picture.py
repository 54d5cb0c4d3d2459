"""Draw what ran where as SVG: a lane per device, a bar per run as high as its memory, coloured by program.

All policies share one time axis, so a shorter makespan looks shorter. The SVG uses no external font or script.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from msgspec import Struct

from gpuyard.model.job import OutcomeKind
from gpuyard.model.units import format_duration, format_size
from gpuyard.simulator.schedule_metrics import PolicyMetrics, SimulatedPass, SimulatedRun
from gpuyard.simulator.traces import TraceJob

_WIDTH, _LEFT, _RIGHT = 1280.0, 92.0, 28.0
_HEADER, _PANEL_HEAD, _AXIS, _GAP = 58.0, 34.0, 40.0, 6.0
_LANE, _MIN_LANE, _LANES_HEIGHT = 96.0, 22.0, 640.0
_MAX_LANES, _MAX_BARS = 32, 20_000
_LEGEND_ROW, _LEGEND_COLUMNS = 20.0, 4
_COLOURS = (
    "#3b6fb6", "#e08a3c", "#4c9f70", "#b5524f", "#7d68b3", "#c9a227", "#3fa7b5", "#c46a9f", "#7a8f3c", "#8a6247",
    "#5f8dd3", "#d9705f",
)  # fmt: skip
_OTHERS = "#a9b1ba"
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #24292f }
.title { font-size: 19px; font-weight: 600 } .sub { font-size: 13px; fill: #57606a }
.name { font-size: 14px; font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.lane { fill: #f3f5f7 } .grid { stroke: #d8dee4; stroke-width: 1 } .half { stroke: #dfe4ea; stroke-dasharray: 3 4 }
.bar { stroke: #ffffff; stroke-width: 0.6 } .failed { stroke: #cf222e; stroke-width: 1.6; fill-opacity: 0.35 }
.bound { stroke: #24292f; stroke-width: 1.2; stroke-dasharray: 5 4 }
"""


class Panel(Struct, frozen=True, kw_only=True):
    """A pass under a policy, and its metrics."""

    passed: SimulatedPass
    metrics: PolicyMetrics


class _Bar(Struct, frozen=True, kw_only=True):
    run: SimulatedRun
    bottom_mb: float
    height_mb: float


def draw_timeline(panels: Sequence[Panel], title: str) -> str:
    """Return the SVG as text."""
    longest_s = max(panel.metrics.makespan_s for panel in panels) or 1.0
    lanes = min(_MAX_LANES, len(panels[0].passed.devices_mb))
    lane = max(_MIN_LANE, min(_LANE, _LANES_HEIGHT / (lanes * len(panels))))
    colours = _colours(panels)
    panel_height = _PANEL_HEAD + lanes * (lane + _GAP) + _AXIS
    legend_top = _HEADER + len(panels) * panel_height
    legend = list(_legend(colours, legend_top))
    height = legend_top + _LEGEND_ROW * (math.ceil(len(legend) / _LEGEND_COLUMNS) + 1.2)
    count = len(panels[0].passed.devices_mb)
    shown = "" if lanes == count else f" (the first {lanes} of {count} devices)"
    bound = "the dashed line is the lower bound on the makespan"
    size = f'viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" height="{height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
        _text(_LEFT - 64, 30, title, "title"),
        _text(_LEFT - 64, 49, f"each bar is a run, as high as its memory; {bound}{shown}", "sub"),
    ]
    for number, panel in enumerate(panels):
        scale = _Scale(top=_HEADER + number * panel_height, lane=lane, longest_s=longest_s)
        parts += _panel(panel, scale, lanes, colours)
    return "\n".join([*parts, *legend, "</svg>\n"])


class _Scale(Struct, frozen=True, kw_only=True):
    """Coordinates in a panel."""

    top: float
    lane: float
    longest_s: float

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.longest_s

    def lane_top(self, position: int) -> float:
        return self.top + _PANEL_HEAD + position * (self.lane + _GAP)


def _panel(panel: Panel, scale: _Scale, lanes: int, colours: Mapping[str, str]) -> Iterator[str]:
    metrics, passed = panel.metrics, panel.passed
    bottom = scale.lane_top(lanes)
    yield _text(_LEFT - 64, scale.top + 22, metrics.policy, "name")
    yield _text(_LEFT - 64 + max(104.0, 9.0 * len(metrics.policy) + 16), scale.top + 22, _summary(metrics), "sub")
    for position in range(lanes):
        yield from _empty_lane(position, passed.devices_mb[position], scale)
    yield from _axis(scale, bottom)
    on_card: dict[int, list[SimulatedRun]] = {}
    for run in passed.runs:
        for position in run.devices:
            on_card.setdefault(position, []).append(run)
    for position in range(lanes):
        total_mb = passed.devices_mb[position]
        lane_bottom = scale.lane_top(position) + scale.lane
        for bar in _stack(on_card.get(position, []), total_mb)[: _MAX_BARS // lanes]:
            job = passed.jobs[bar.run.job]
            colour = colours.get(program_name(job), _OTHERS)
            x, right = scale.x(bar.run.started_s), scale.x(bar.run.ended_s)
            height = scale.lane * bar.height_mb / total_mb
            y = lane_bottom - scale.lane * bar.bottom_mb / total_mb - height
            yield _draw_bar(bar.run, job, (x, y, max(0.6, right - x), height), colour)
    x = scale.x(metrics.bound_s)
    if metrics.bound_s <= scale.longest_s:
        yield f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.lane_top(0):.1f}" y2="{bottom:.1f}"/>'


def _summary(metrics: PolicyMetrics) -> str:
    parts = [
        f"pass {metrics.pass_number}",
        f"makespan {format_duration(metrics.makespan_s)}, {metrics.over_bound:.2f} times the lower bound",
        f"compute {metrics.compute_percent:.0f}%",
        f"memory {metrics.memory_percent:.0f}%",
        f"mean wait {format_duration(metrics.mean_wait_s)}",
    ]
    if metrics.out_of_memory:
        parts.append(f"{metrics.out_of_memory} out of memory")
    if metrics.lost:
        parts.append(f"{metrics.lost} lost")
    return " · ".join(parts)


def _empty_lane(position: int, total_mb: float, scale: _Scale) -> Iterator[str]:
    top, width = scale.lane_top(position), _WIDTH - _LEFT - _RIGHT
    yield f'<rect class="lane" x="{_LEFT:g}" y="{top:.1f}" width="{width:g}" height="{scale.lane:.1f}"/>'
    middle = top + scale.lane / 2
    yield f'<line class="half" x1="{_LEFT:g}" x2="{_LEFT + width:g}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
    yield _text(_LEFT - 8, middle + (0 if scale.lane > 40 else 4), f"GPU {position}", "small", anchor="end")
    if scale.lane > 40:
        yield _text(_LEFT - 8, middle + 14, format_size(total_mb), "small", anchor="end")


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    step_s = next((step for step in _STEPS_S if scale.longest_s / step <= 12), _STEPS_S[-1])
    while scale.longest_s / step_s > 12:
        step_s *= 2
    for number in range(int(scale.longest_s / step_s) + 1):
        x = scale.x(number * step_s)
        top = scale.lane_top(0)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke-opacity="0.7"/>'
        yield _text(x, bottom + 12, format_duration(number * step_s), "small", anchor="middle")
    yield _text(_WIDTH - _RIGHT, bottom + 27, "time since the first arrival", "small", anchor="end")


def _draw_bar(run: SimulatedRun, job: TraceJob, box: tuple[float, float, float, float], colour: str) -> str:
    x, y, width, height = box
    kind = "bar" if run.outcome is OutcomeKind.SUCCEEDED else "bar failed"
    took = format_duration(run.ended_s - run.started_s)
    tooltip = f"{job.program}: {format_size(run.peak_mb)}, {took}, {run.outcome}"
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}">'
        f"<title>{escape(tooltip)}</title></rect>"
    )


def _stack(runs: Sequence[SimulatedRun], total_mb: float) -> list[_Bar]:
    """Return a bar per run, each as low as it fits above the bars that overlap it in time."""
    bars: list[_Bar] = []
    live: list[_Bar] = []
    for run in sorted(runs, key=lambda run: run.started_s):
        live = [bar for bar in live if bar.run.ended_s > run.started_s]
        height, bottom = min(run.peak_mb, total_mb), 0.0
        for bar in sorted(live, key=lambda bar: bar.bottom_mb):
            if bar.bottom_mb - bottom >= height:
                break
            bottom = max(bottom, bar.bottom_mb + bar.height_mb)
        live.append(_Bar(run=run, bottom_mb=min(bottom, total_mb - height), height_mb=height))
        bars.append(live[-1])
    return bars


def program_name(job: TraceJob) -> str:
    """Return the name of the script (not of its interpreter), without its suffix."""
    arguments = job.program.split()
    script = next((argument for argument in arguments if "." in argument), arguments[0])
    return script.rsplit("/", 1)[-1].rsplit(".", 1)[0]


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Return the colours of programs; if there are too many, only those that take the most time get one."""
    seconds: Counter[str] = Counter()
    for job in panels[0].passed.jobs:
        seconds[program_name(job)] += int(job.duration_s * job.gpus)
    most = [name for name, _ in seconds.most_common()]
    own = most if len(most) <= len(_COLOURS) else most[: len(_COLOURS) - 1]
    colours = dict(zip(own, _COLOURS, strict=False))
    return colours if len(own) == len(most) else {**colours, "others": _OTHERS}


def _legend(colours: Mapping[str, str], top: float) -> Iterator[str]:
    width = (_WIDTH - _LEFT - _RIGHT) / _LEGEND_COLUMNS
    for number, (name, colour) in enumerate(colours.items()):
        row, column = divmod(number, _LEGEND_COLUMNS)
        x, y = _LEFT + column * width, top + row * _LEGEND_ROW
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>'
            + _text(x + 18, y + 10.5, name, "small")
        )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
