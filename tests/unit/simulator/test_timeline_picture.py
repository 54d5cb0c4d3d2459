"""The picture is an SVG with a bar for every run."""

from xml.etree import ElementTree as ET

from gpuyard.model.job import OutcomeKind
from gpuyard.simulator.schedule_metrics import MakespanBound, SimulatedPass, SimulatedRun, measure_pass
from gpuyard.simulator.timeline_picture import Panel, draw_timeline, program_name
from gpuyard.simulator.traces import TraceJob
from tests.unit.simulator.samples import trace_job

SVG = "{http://www.w3.org/2000/svg}"
BOUND = MakespanBound(longest_s=100.0, compute_s=0.0, memory_s=0.0, crowding_s=0.0)


def run(job: int, started_s: float, *devices: int, outcome: OutcomeKind = OutcomeKind.SUCCEEDED) -> SimulatedRun:
    ended_s = started_s + 100.0
    return SimulatedRun(job=job, started_s=started_s, ended_s=ended_s, devices=devices, outcome=outcome, peak_mb=9000.0)


def panel(jobs: list[TraceJob], runs: list[SimulatedRun], name: str = "gpuyard", cards: int = 2) -> Panel:
    passed = SimulatedPass(jobs=jobs, runs=runs, devices_mb=(24_576.0,) * cards, memory_mb_s=1.0, compute_s=1.0)
    return Panel(passed=passed, metrics=measure_pass(name, 1, passed, BOUND))


def bars(svg: str) -> list[ET.Element]:
    return [rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if "bar" in rect.get("class", "")]


def test_each_run_has_a_bar_on_each_of_its_devices() -> None:
    jobs = [trace_job(program='python "<a&b>.py"'), trace_job(), trace_job(gpus=2)]
    runs = [run(0, 0.0, 0), run(1, 50.0, 0), run(2, 200.0, 0, 1)]
    assert len(bars(draw_timeline([panel(jobs, runs)], "three & a <title>"))) == 4
    both = bars(draw_timeline([panel([trace_job()] * 2, [run(0, 0.0, 0), run(1, 50.0, 0)])], "t"))
    spans = sorted((float(bar.get("y", "")), float(bar.get("height", ""))) for bar in both)
    assert spans[0][0] + spans[0][1] <= spans[1][0] + 0.1, "bars that overlap in time are stacked"
    # A run that failed looks different.
    runs = [run(0, 0.0, 0, outcome=OutcomeKind.OUT_OF_MEMORY), run(0, 100.0, 0)]
    assert sorted(bar.get("class", "") for bar in bars(draw_timeline([panel([trace_job()], runs)], "t"))) == [
        "bar",
        "bar failed",
    ]


def test_panels_devices_and_programs_are_named() -> None:
    jobs, runs = [trace_job()], [run(0, 0.0, 0)]
    svg = draw_timeline([panel(jobs, runs, "fifo"), panel(jobs, runs, "gpuyard")], "t")
    texts = [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"fifo", "gpuyard"} <= set(texts)
    assert sum("makespan 1m 40s" in text for text in texts) == 2, "each policy has its panel with its makespan"
    svg = draw_timeline([panel([trace_job()] * 100, [run(n, 0.0, n) for n in range(100)], cards=100)], "t")
    assert len(bars(svg)) == 32
    assert "the first 32 of 100 devices" in svg, "only the first of many devices are shown and the picture says so"
    jobs = [trace_job(program=f"python {number}.py", duration_s=100.0 + number) for number in range(30)]
    svg = draw_timeline([panel(jobs, [run(number, 0.0, 0) for number in range(30)])], "t")
    assert ">others<" in svg
    assert len({bar.get("fill") for bar in bars(svg)}) == 12, "programs with most work have colours of their own"
    assert program_name(trace_job(program="python src/train.py --lr 1.5")) == "train"
    assert program_name(trace_job(program="nvidia-smi")) == "nvidia-smi", "a program is named after its script"
