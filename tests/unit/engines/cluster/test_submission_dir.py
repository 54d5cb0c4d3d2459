"""Submission directories: complete or absent, private, and each file read once."""

import contextlib
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.cluster.submission_dir import (
    VOID,
    ElementStart,
    ElementTrace,
    Finish,
    SubmissionDirs,
    SubmittedElement,
)
from gpuyard.engines.common.program_outcome import StartContext
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.job import Usage
from gpuyard.model.job_spec import DEFAULT_LOG_CAP_MB
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.ports import Launch

TERMS = ClusterTerms(need=Need(devices=1, memory=FixedMemory(512.0)), name="job", options=("--hold",))
CAP = int(DEFAULT_LOG_CAP_MB * 1048576)
BEGAN = {"at": 12.5, "node": "n0", "pid": 42}
ENDED = {"word": "0", "pid": 43, "at": 13.5, "usage": {"peaks_mb": {"GPU-1": 123.0}, "ram_mb": 55.0}}


@pytest.fixture
def submissions(tmp_path: Path) -> SubmissionDirs:
    return SubmissionDirs(tmp_path / "shared")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Simulate a full disk: no file of this process can grow (the error code differs)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def launch(job_id: int = 1, attempt: int = 1, **changes: object) -> Launch:
    fields = {"command": ("true", str(job_id)), "cwd": "/", "environment": {"PATH": "/bin"}, "terms": TERMS, **changes}
    return Launch(job_id=job_id, attempt=attempt, **fields)  # type: ignore[arg-type]


def put(submissions: SubmissionDirs, name: str, content: object, token: str = "t") -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    Path(submissions.path(token), name).write_text(text)


def test_launches_are_read_in_the_order_they_were_written(submissions: SubmissionDirs) -> None:
    other = launch(9, output="/x", split_stderr=True)
    submissions.write("t", [(launch(17, 2, cwd="/here", stdin="/in"), "/logs/17.2.log"), (other, "/logs/9.1.log")])
    assert submissions.read("t") == (
        TERMS,
        [
            SubmittedElement(
                key="17.2",
                outputs=(("/logs/17.2.log", CAP),),
                context=StartContext(directory="/here", program="true", stdin="/in", output=""),
            ),
            SubmittedElement(
                key="9.1",
                outputs=(("/x", 0), ("/logs/9.1.err.log", CAP)),
                context=StartContext(directory="/", program="true", output="/x"),
            ),
        ],
    )


def test_an_element_stores_only_the_variables_in_which_it_differs(submissions: SubmissionDirs) -> None:
    shared = {f"NAME_{number}": "x" * 100 for number in range(100)}
    submissions.write("t", [(launch(n, environment={**shared, "ID": str(n)}), f"/logs/{n}") for n in range(100)])
    assert Path(submissions.path("t"), "submission.json").stat().st_size < 50_000


def test_other_users_cannot_read_a_submission(submissions: SubmissionDirs, tmp_path: Path) -> None:
    before = os.umask(0)
    submissions.write("t", [(launch(), "/log")])
    submissions.mark_submitted("t")
    submissions.mark_lost("t", 0)
    submissions.void("t", 0)
    os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "shared/submissions").rglob("*")}
    assert modes == {"t": 0o700, **dict.fromkeys(("submission.json", "submitted", "0.lost", "0.started"), 0o600)}


def test_a_submission_that_fails_on_a_full_disk_can_be_written_later(submissions: SubmissionDirs) -> None:
    with full_disk(), pytest.raises(EnvironmentFault, match="cannot be used for cluster jobs"):
        submissions.write("t", [(launch(), "/log")])
    assert submissions.all() == []
    submissions.write("t", [(launch(), "/log")])
    assert submissions.all() == ["t"]


def test_the_next_daemon_finds_submissions_and_removes_partial_ones(
    submissions: SubmissionDirs, tmp_path: Path
) -> None:
    assert submissions.all() == []
    for token in ("b", "a"):
        submissions.write(token, [(launch(), "/log")])
    (tmp_path / "shared/submissions/.c").mkdir()
    assert SubmissionDirs(tmp_path / "shared").all() == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "shared/submissions")) == ["a", "b"]


def test_a_forgotten_submission_is_deleted_and_a_site_gives_it_one_id(
    submissions: SubmissionDirs, tmp_path: Path
) -> None:
    submissions.write("t", [(launch(), "/log")])
    put(submissions, "0.started", BEGAN)
    assert submissions.traces("t")
    submissions.forget("t")
    assert os.listdir(tmp_path / "shared/submissions") == []
    submissions.forget("t")
    with pytest.raises(EnvironmentFault, match=r"t/submission.json .*No such file"):
        submissions.read("t")
    submissions.write("t", [(launch(), "/log")])
    assert submissions.traces("t") == {}
    assert submissions.known_as("t") == ""
    submissions.mark_submitted("t", "17")
    submissions.mark_submitted("t", "18")
    assert submissions.known_as("t") == "17"


def test_a_missing_folder_does_not_mean_that_nothing_started(submissions: SubmissionDirs, tmp_path: Path) -> None:
    submissions.write("t", [(launch(), "/log")])
    (tmp_path / "shared").rename(tmp_path / "away")
    for ask in (submissions.traces, submissions.read, submissions.mark_submitted):
        with pytest.raises(EnvironmentFault, match="shared/submissions/t") as caught:
            ask("t")
        assert caught.value.hint is not None
    with pytest.raises(EnvironmentFault):
        submissions.void("t", 0)


def test_an_element_voided_before_its_start_stays_void(submissions: SubmissionDirs, tmp_path: Path) -> None:
    submissions.write("t", [(launch(), "/log")])
    assert submissions.void("t", 0)
    assert submissions.void("t", 0)
    assert SubmissionDirs(tmp_path / "shared").void("t", 0)
    assert submissions.traces("t") == {0: ElementTrace(started=VOID)}


@pytest.mark.parametrize("content", [BEGAN, "", '{"at": 1'])
def test_a_started_element_cannot_be_voided_even_half_recorded(submissions: SubmissionDirs, content: object) -> None:
    submissions.write("t", [(launch(), "/log")])
    put(submissions, "0.started", content)
    assert not submissions.void("t", 0)


def test_voiding_that_fails_on_a_full_disk_can_be_repeated_later(submissions: SubmissionDirs) -> None:
    submissions.write("t", [(launch(), "/log")])
    with full_disk(), pytest.raises(EnvironmentFault, match=r"0\.started"):
        submissions.void("t", 0)
    assert submissions.traces("t") == {}
    assert submissions.void("t", 0)


def test_traces_contain_the_records_of_each_element(submissions: SubmissionDirs) -> None:
    submissions.write("t", [(launch(n), "/log") for n in range(12)])
    assert submissions.traces("t") == {}
    put(submissions, "11.started", BEGAN)
    began = ElementStart(at=12.5, node="n0", pid=42)
    assert submissions.traces("t") == {11: ElementTrace(started=began)}
    put(submissions, "11.ended", ENDED)
    put(submissions, "3.ended", {"word": "no-program", "pid": None, "at": 14.0, "usage": None})
    usage = Usage(peaks_mb={"GPU-1": 123.0}, ram_mb=55.0)
    assert submissions.traces("t") == {
        3: ElementTrace(ended=Finish(word="no-program", at=14.0)),
        11: ElementTrace(started=began, ended=Finish(word="0", at=13.5, pid=43, usage=usage)),
    }


@pytest.mark.parametrize("content", ["", "{", '{"word": "0", "at": 1', "[]", '{"at": 1.0}', "voi", "\udcff"])
def test_an_incomplete_record_is_ignored(submissions: SubmissionDirs, content: str) -> None:
    submissions.write("t", [(launch(), "/log")])
    for name in ("0.started", "0.ended"):
        Path(submissions.path("t"), name).write_bytes(os.fsencode(content))
    assert submissions.traces("t") == {}
    put(submissions, "0.ended", ENDED)
    assert [trace.ended is not None for trace in submissions.traces("t").values()] == [True]


def test_other_files_are_ignored_and_the_last_part_of_the_output_is_returned(submissions: SubmissionDirs) -> None:
    submissions.write("t", [(launch(), "/log")])
    for name in ("0.ended.draft", "0.out", "0.usage", "x.ended", "0.lost", ".0.started", "submitted"):
        put(submissions, name, ENDED)
    assert submissions.traces("t") == {}
    assert submissions.output("t", 1) is None
    put(submissions, "0.out", "x" * 100_000 + "the end\n")
    output = submissions.output("t", 0)
    assert output is not None
    assert output.endswith(b"xthe end\n")
    assert len(output) < 70_000
