"""Draw what ran where as SVG: a lane per device, a bar per run as high as its memory, coloured by program.

All policies share one time axis, so a shorter makespan looks shorter. The SVG uses no external font or script."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from msgspec import Struct

from gpuyard.model.job import OutcomeKind
from gpuyard.model.units import format_duration, format_size
from gpuyard.simulator.schedule_metrics import PolicyMetrics, SimulatedPass, SimulatedRun
from gpuyard.simulator.traces import TraceJob

_WIDTH, _LEFT, _INNER = 1280.0, 92.0, 1160.0
_HEADER, _PANEL_HEAD, _GAP = 58.0, 34.0, 6.0
_LEGEND_ROW, _LEGEND_COLUMNS = 20.0, 4
_COLOURS = (
    "#3b6fb6", "#e08a3c", "#4c9f70", "#b5524f", "#7d68b3", "#c9a227", "#3fa7b5", "#c46a9f", "#7a8f3c", "#8a6247",
    "#5f8dd3", "#d9705f",
)  # fmt: skip
_OTHERS = "#a9b1ba"
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #24292f }
.title { font-size: 19px; font-weight: 600 } .sub { font-size: 13px; fill: #57606a }
.name { font-size: 14px; font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.lane { fill: #f3f5f7 } .grid { stroke: #d8dee4; stroke-width: 1 } .half { stroke: #dfe4ea; stroke-dasharray: 3 4 }
.bar { stroke: #ffffff; stroke-width: 0.6 } .failed { stroke: #cf222e; stroke-width: 1.6; fill-opacity: 0.35 }
.bound { stroke: #24292f; stroke-width: 1.2; stroke-dasharray: 5 4 }
"""


_Bar = tuple[SimulatedRun, float, float]  # a run, the bottom of its bar and its height in MB


class Panel(Struct, frozen=True, kw_only=True):
    passed: SimulatedPass
    metrics: PolicyMetrics


def draw_timeline(panels: Sequence[Panel], title: str) -> str:
    count = len(panels[0].passed.devices_mb)
    lanes = min(32, count)
    colours = _colours(panels)
    rows = math.ceil(len(colours) / _LEGEND_COLUMNS)
    picture = _Picture(
        longest_s=max(panel.metrics.makespan_s for panel in panels) or 1.0,
        lanes=lanes,
        lane=max(22.0, min(96.0, 640.0 / (lanes * len(panels)))),
        colours=colours,
    )
    legend_top = _HEADER + len(panels) * picture.panel_height
    height = legend_top + _LEGEND_ROW * (rows + 1.2)
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
        parts += picture.panel(panel, _HEADER + number * picture.panel_height)
    for number, (name, colour) in enumerate(colours.items()):
        row, column = divmod(number, _LEGEND_COLUMNS)
        x, y = _LEFT + column * _INNER / _LEGEND_COLUMNS, legend_top + row * _LEGEND_ROW
        square = f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>'
        parts.append(square + _text(x + 18, y + 10.5, name, "small"))
    return "\n".join([*parts, "</svg>\n"])


class _Picture(Struct, frozen=True, kw_only=True):
    """What all panels share: the time axis, the number and height of lanes, the colours of programs."""

    longest_s: float
    lanes: int
    lane: float
    colours: Mapping[str, str]

    @property
    def panel_height(self) -> float:
        return _PANEL_HEAD + self.lanes * (self.lane + _GAP) + 40.0

    def x(self, seconds: float) -> float:
        return _LEFT + _INNER * seconds / self.longest_s

    def panel(self, panel: Panel, top: float) -> Iterator[str]:
        metrics, passed = panel.metrics, panel.passed
        yield _text(_LEFT - 64, top + 22, metrics.policy, "name")
        yield _text(_LEFT - 64 + max(104.0, 9.0 * len(metrics.policy) + 16), top + 22, _summary(metrics), "sub")
        tops = [top + _PANEL_HEAD + position * (self.lane + _GAP) for position in range(self.lanes + 1)]
        bottom = tops.pop()
        for position, (lane_top, total_mb) in enumerate(zip(tops, passed.devices_mb, strict=False)):
            middle = lane_top + self.lane / 2
            yield f'<rect class="lane" x="{_LEFT:g}" y="{lane_top:.1f}" width="{_INNER:g}" height="{self.lane:.1f}"/>'
            yield f'<line class="half" x1="{_LEFT:g}" x2="{_LEFT + _INNER:g}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            yield _text(_LEFT - 8, middle + (0 if self.lane > 40 else 4), f"GPU {position}", "small", anchor="end")
            if self.lane > 40:
                yield _text(_LEFT - 8, middle + 14, format_size(total_mb), "small", anchor="end")
        yield from self._axis(tops[0], bottom)
        for position, (lane_top, total_mb) in enumerate(zip(tops, passed.devices_mb, strict=False)):
            runs = [run for run in passed.runs if position in run.devices]
            for bar in _stack(runs, total_mb)[: 20_000 // self.lanes]:
                yield self._bar(bar, passed.jobs[bar[0].job], lane_top + self.lane, self.lane / total_mb)
        if metrics.bound_s <= self.longest_s:
            x = self.x(metrics.bound_s)
            yield f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{tops[0]:.1f}" y2="{bottom:.1f}"/>'

    def _axis(self, top: float, bottom: float) -> Iterator[str]:
        steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
        step_s = next((step for step in steps if self.longest_s / step <= 12), steps[-1])
        while self.longest_s / step_s > 12:
            step_s *= 2
        for number in range(int(self.longest_s / step_s) + 1):
            x = self.x(number * step_s)
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
            yield f'<line class="grid" {ends} stroke-opacity="0.7"/>'
            yield _text(x, bottom + 12, format_duration(number * step_s), "small", anchor="middle")
        yield _text(_LEFT + _INNER, bottom + 27, "time since the first arrival", "small", anchor="end")

    def _bar(self, bar: _Bar, job: TraceJob, bottom: float, per_mb: float) -> str:
        run, bottom_mb, height_mb = bar
        x, height = self.x(run.started_s), per_mb * height_mb
        y, width = bottom - per_mb * bottom_mb - height, max(0.6, self.x(run.ended_s) - x)
        kind = "bar" if run.outcome is OutcomeKind.SUCCEEDED else "bar failed"
        took = format_duration(run.ended_s - run.started_s)
        tooltip = f"{job.program}: {format_size(run.peak_mb)}, {took}, {run.outcome}"
        box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        colour = self.colours.get(program_name(job), _OTHERS)
        return f'<rect class="{kind}" {box} fill="{colour}"><title>{escape(tooltip)}</title></rect>'


def _summary(metrics: PolicyMetrics) -> str:
    parts = [
        f"pass {metrics.pass_number}",
        f"makespan {format_duration(metrics.makespan_s)}, {metrics.over_bound:.2f} times the lower bound",
        f"compute {metrics.compute_percent:.0f}%",
        f"memory {metrics.memory_percent:.0f}%",
        f"mean wait {format_duration(metrics.mean_wait_s)}",
        f"{metrics.out_of_memory} out of memory" if metrics.out_of_memory else "",
        f"{metrics.lost} lost" if metrics.lost else "",
    ]
    return " · ".join(filter(None, parts))


def _stack(runs: Sequence[SimulatedRun], total_mb: float) -> list[_Bar]:
    """Return a bar per run, each as low as it fits above the bars that overlap it in time."""
    bars: list[_Bar] = []
    live: list[_Bar] = []
    for run in sorted(runs, key=lambda run: run.started_s):
        live = [bar for bar in live if bar[0].ended_s > run.started_s]
        height, bottom = min(run.peak_mb, total_mb), 0.0
        for _, bottom_mb, height_mb in sorted(live, key=lambda bar: bar[1]):
            if bottom_mb - bottom >= height:
                break
            bottom = max(bottom, bottom_mb + height_mb)
        live.append((run, min(bottom, total_mb - height), height))
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


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
