"""The cluster engine with removed submissions, changed folders, and arguments that cannot be written."""

import os
import select
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.engines.cluster.site import ClusterSubmission, SiteReport
from gpuyard.model.job import OutcomeKind
from gpuyard.model.lease import Need
from tests.contract.cluster_engines import hasten
from tests.fakes.site import ProcessSite
from tests.integration.cluster_engine_fixture import (
    NEVER_STARTED,
    SUCCEEDED,
    TERMS,
    EngineHarness,
    GatedSite,
    attempt_of,
)


@pytest.fixture
def site() -> Iterator[GatedSite]:
    slow_again = hasten()
    site = GatedSite()
    yield site
    site.close()
    slow_again()


@pytest.fixture
def harness(tmp_path: Path, site: ProcessSite) -> Iterator[EngineHarness]:
    harness = EngineHarness(tmp_path, site)
    yield harness
    harness.close()


def submissions(harness: EngineHarness) -> list[Path]:
    return sorted((harness.folder / "shared" / "yonder" / "submissions").iterdir())


def test_a_removed_submission_is_reported_by_the_site_and_others_continue(
    harness: EngineHarness, site: ProcessSite
) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    [first] = submissions(harness)
    harness.hand_over(harness.waiting(2))
    harness.until_runs(2)
    shutil.rmtree(first)
    harness.let_go(2)
    assert harness.until_ended(2) == [SUCCEEDED]
    harness.hand_over(harness.launch(3))
    assert harness.until_ended(3) == [SUCCEEDED]
    site.forget_all()
    assert harness.until_ended(1)[0][0] is OutcomeKind.LOST


def test_a_folder_that_is_not_a_submission_is_ignored(harness: EngineHarness) -> None:
    attempts = harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    stray = submissions(harness)[0].parent / "stray"
    stray.mkdir()
    harness.take_over(*attempts)
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert stray.is_dir()


def test_a_job_running_under_the_old_folder_is_never_reported_as_not_started(harness: EngineHarness) -> None:
    """The shared folder was changed while the job ran: the engine reports it, and waits until it is set back."""
    [attempt] = harness.hand_over(harness.waiting(1))
    harness.until_runs(1)  # its supervisor has found the old folder
    harness.until(lambda: harness.statuses, "where it is")
    known = replace(
        attempt, site_id=harness.statuses[-1].site_id, log=str(harness.folder / "shared" / "logs" / "1.1.log")
    )
    shared = harness.folder / "shared"
    shared.rename(harness.folder / "elsewhere")
    (shared / "yonder" / "submissions").mkdir(parents=True)
    harness.take_over(replace(known, log=str(harness.folder / "elsewhere" / "logs" / "1.1.log")))
    harness.until(lambda: "set the folder back" in (harness.engine.offer().trouble or ""), "the hint")
    assert not harness.ends
    harness.close()
    shutil.rmtree(shared)
    (harness.folder / "elsewhere").rename(shared)
    harness.take_over(known)
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(1) == 1


def test_a_job_that_started_without_a_record_is_lost_with_its_node(
    harness: EngineHarness, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuyard.engines.cluster.submission_dir._WRITTEN_WITHIN_S", 0.0)
    attempts = harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    [submission] = submissions(harness)
    harness.close()
    os.truncate(submission / "0.started", 0)
    site.forget_all()
    harness.take_over(*attempts)
    assert harness.until_ended(1)[0][0] is OutcomeKind.LOST


def test_terms_that_cannot_be_written_are_an_error(harness: EngineHarness) -> None:
    strange = replace(TERMS, need=Need(model="t\udcff"))
    harness.until(lambda: harness.engine.offer().trouble is None, "the first offer")
    harness.hand_over(harness.launch(1, terms=strange))
    assert harness.until_ended(1) == [NEVER_STARTED]
    assert "a bug" in (harness.ends[1].outcome.reason or "")


def test_unsent_submissions_do_not_delay_reported_ends_while_the_site_is_down(
    harness: EngineHarness, site: ProcessSite
) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    site.down = True
    harness.hand_over(*(harness.launch(number, terms=replace(TERMS, priority=number)) for number in range(2, 12)))
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert sum(call.startswith("submit") for call in site.calls) <= 2
    site.down = False
    assert set(harness.until_ended(*range(2, 12))) <= {SUCCEEDED, NEVER_STARTED}


def test_a_job_handed_over_while_the_site_goes_down_is_given_the_reason(
    harness: EngineHarness, site: GatedSite
) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    with site.shut():
        site.down = True
        harness.hand_over(harness.launch(2))
    harness.until(
        lambda: any(each.job_id == 2 and "connection refused" in each.reason for each in harness.statuses), "a reason"
    )
    site.down = False
    harness.let_go(1)
    assert harness.until_ended(1, 2) == [SUCCEEDED, SUCCEEDED]


def test_a_site_that_no_job_waits_for_is_not_polled_again(harness: EngineHarness, site: ProcessSite) -> None:
    site.down = True
    harness.until(lambda: "connection refused" in (harness.engine.offer().trouble or ""), "the trouble")
    reports = len(site.calls)
    harness.until(
        lambda: len(site.calls) > reports or harness.engine.offer(), "one more report, because the offer was requested"
    )

    def rests() -> bool:
        before = len(site.calls)
        select.select([], [], [], 0.5)  # longer than the interval between two reports
        return len(site.calls) == before

    harness.until(rests, "rest")


def test_the_next_daemon_knows_the_site_s_id_of_a_submission(
    harness: EngineHarness, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, report = site.submit, site.report
    known: list[str] = []

    def note(live: Sequence[ClusterSubmission]) -> SiteReport:
        known.extend(each.known_as for each in live)
        return report(live)

    monkeypatch.setattr(site, "submit", lambda submission: submit(submission) or "no. 17")
    attempts = harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    monkeypatch.setattr(site, "report", note)
    harness.take_over(*attempts)
    harness.until(lambda: "no. 17" in known, "its name")
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]


def test_an_attempt_whose_files_are_gone_for_good_is_lost_and_cancelled_at_the_site(
    harness: EngineHarness, site: ProcessSite
) -> None:
    [attempt] = harness.hand_over(harness.waiting(1))
    harness.until(lambda: harness.statuses and harness.runs(1), "where it is")
    known = replace(attempt_of(1), site_id=harness.statuses[-1].site_id)
    assert attempt.key == known.key
    for submission in submissions(harness):
        shutil.rmtree(submission)
    harness.take_over(known)
    assert harness.until_ended(1)[0][0] is OutcomeKind.LOST
    assert "cancel 1" in site.calls
