"""Trace files: written traces are read back, and an error names its line."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.simulator.traces import TraceJob, parse_trace, phases_of, read_trace, write_trace
from tests.unit.simulator.samples import trace_job

HEADER = "at_s,program,duration_s,peak_mb,load_percent"
LINE = "0,python train.py,60,1000,50"

figures = st.floats(0, 1e6, allow_nan=False, width=32)


@st.composite
def jobs(draw: st.DrawFn) -> TraceJob:
    duration_s = draw(st.floats(1, 1e5, width=32))
    peak_mb = draw(figures)
    has_late = draw(st.booleans()) and peak_mb > 0
    return TraceJob(
        at_s=draw(figures),
        program=draw(st.sampled_from(["python a.py", "sh -c \"echo, 'hm'\"", "träne"])),
        duration_s=duration_s,
        peak_mb=peak_mb,
        load_percent=draw(st.floats(0, 100)),
        gpus=draw(st.integers(1, 8)),
        declared_mb=draw(st.none() | figures),
        start_s=duration_s / 4 if draw(st.booleans()) else 0.0,
        ramp_s=duration_s / 4 if draw(st.booleans()) else 0.0,
        late_s=duration_s / 2 if has_late else None,
        late_mb=peak_mb / 3 if has_late else 0.0,
        priority=draw(st.integers(-5, 5)),
        urgent=draw(st.integers(0, 1)),
        kind=draw(st.sampled_from(["", "foreign", "BERT/SQuAD/32"])),
    )


@given(st.lists(jobs(), max_size=5))
def test_a_written_trace_is_read_back(written: list[TraceJob]) -> None:
    file = io.StringIO()
    write_trace(written, file)
    assert list(parse_trace(io.StringIO(file.getvalue()), "trace")) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER},gpu\n{LINE},1", "unknown columns: gpu"),
        ("at_s,program\n0,a", "lacks the columns duration_s, peak_mb, load_percent"),
        (f"{HEADER},gpus,gpus\n{LINE},1,1", "a column twice"),
        (f"{HEADER}\n{LINE}\n0,a,60,1000", "line 3: 4 values for 5 columns"),
        (f"{HEADER}\n0,a,soon,1000,50", "line 2: duration_s is 'soon', not a number"),
        (f"{HEADER}\n0,,60,1000,50", "line 2: program is empty"),
        (f"{HEADER}\n0,a,60,-1,50", "line 2: peak_mb is -1, but must be"),
        (f"{HEADER}\n0,a,60,nan,50", "line 2: peak_mb is nan, but must be"),
        (f"{HEADER}\n0,a,0,1000,50", "line 2: duration_s must be more than 0"),
        (f"{HEADER}\n0,a,60,1000,101", "line 2: load_percent must be from 0 to 100"),
        (f"{HEADER},gpus\n{LINE},0", "line 2: gpus must be at least 1"),
        (f"{HEADER},ramp_s\n{LINE},61", "line 2: start_s and ramp_s are longer than duration_s"),
        (f"{HEADER},late_s\n{LINE},30", "line 2: late_s and late_mb go together"),
        (f"{HEADER},late_s,late_mb\n{LINE},30,2000", "line 2: late_mb must be at most peak_mb"),
        (f'{HEADER}\n0,"a,60,1000,50', "line 2: unexpected end of data"),
    ],
)
def test_an_error_names_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(parse_trace(io.StringIO(text), "trace.csv"))


def test_a_trace_without_jobs_or_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n")
    with pytest.raises(UserError, match=r"trace\.csv has no jobs"):
        read_trace(path)
    # A trace that cannot be read is the environments fault.
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        read_trace(tmp_path / "missing.csv")
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n9,b,60,1000,50\n1,a,60,1000,50\n")
    assert [job.program for job in read_trace(path)] == ["a", "b"], "jobs come in the order of their arrival"


@given(jobs())
def test_memory_only_grows_and_ends_at_the_peak(job: TraceJob) -> None:
    phases = phases_of(job)
    held = [phase.memory_mb for phase in phases]
    assert held == sorted(held)
    assert held[-1] == pytest.approx(job.peak_mb)
    assert phases[0].from_s == 0.0
    assert all(phase.from_s < job.duration_s for phase in phases)


def test_memory_that_comes_late_and_columns_that_are_left_out() -> None:
    phases = phases_of(trace_job(peak_mb=1000.0, duration_s=100.0, late_s=50.0, late_mb=300.0))
    assert [(phase.from_s, phase.memory_mb) for phase in phases] == [(0.0, 700.0), (50.0, 1000.0)]
    # Columns beyond the first five may be left out or empty.
    lines = [f"{HEADER},declared_mb,gpus", f"{LINE},,2"]
    assert list(parse_trace(lines, "t")) == [
        TraceJob(at_s=0, program="python train.py", duration_s=60, peak_mb=1000, load_percent=50, gpus=2)
    ]
