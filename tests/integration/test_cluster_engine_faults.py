"""The cluster engine with removed submissions, changed folders, and arguments that cannot be written."""

import os
import select
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.lease import Need
from gpuyard.engines.cluster.site import ClusterSubmission, SiteReport
from tests.contract.cluster_engines import hasten
from tests.fakes.site import ProcessSite
from tests.integration.cluster_engine_fixture import SUCCEEDED, TERMS, UNBEGUN, GatedSite, Post, attempt_of


@pytest.fixture
def site() -> Iterator[GatedSite]:
    slow_again = hasten()
    site = GatedSite()
    yield site
    site.close()
    slow_again()


@pytest.fixture
def post(tmp_path: Path, site: ProcessSite) -> Iterator[Post]:
    post = Post(tmp_path, site)
    yield post
    post.close()


def submissions(post: Post) -> list[Path]:
    return sorted((post.folder / "shared" / "yonder" / "parcels").iterdir())


def test_a_removed_submission_is_reported_by_the_site_and_others_continue(post: Post, site: ProcessSite) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    [first] = submissions(post)
    post.hand_over(post.waiting(2))
    post.until_runs(2)
    shutil.rmtree(first)
    post.let_go(2)
    assert post.until_ended(2) == [SUCCEEDED]
    post.hand_over(post.launch(3))
    assert post.until_ended(3) == [SUCCEEDED]
    site.forget_all()
    assert post.until_ended(1)[0][0] is OutcomeKind.LOST


def test_a_folder_that_is_not_a_submission_is_ignored(post: Post) -> None:
    attempts = post.hand_over(post.waiting(1))
    post.until_runs(1)
    stray = submissions(post)[0].parent / "stray"
    stray.mkdir()
    post.succeed(*attempts)
    post.let_go(1)
    assert post.until_ended(1) == [SUCCEEDED]
    assert stray.is_dir()


def test_a_job_running_under_the_old_folder_is_never_reported_as_not_started(post: Post) -> None:
    """The folder was changed while it was out there: that is told, and all waits until it is set back."""
    [attempt] = post.hand_over(post.waiting(1))
    post.until_runs(1)  # its supervisor has found the folder where it was
    post.until(lambda: post.seen, "where it is")
    known = replace(attempt, site_id=post.seen[-1].site_id, log=str(post.folder / "shared" / "logs" / "1.1.log"))
    shared = post.folder / "shared"
    shared.rename(post.folder / "elsewhere")
    (shared / "yonder" / "parcels").mkdir(parents=True)
    post.succeed(replace(known, log=str(post.folder / "elsewhere" / "logs" / "1.1.log")))
    post.until(lambda: "set the folder back" in (post.engine.offer().trouble or ""), "the hint")
    assert not post.ends
    post.close()
    shutil.rmtree(shared)
    (post.folder / "elsewhere").rename(shared)
    post.succeed(known)
    post.let_go(1)
    assert post.until_ended(1) == [SUCCEEDED]
    assert post.runs(1) == 1


def test_a_job_that_started_without_a_record_is_lost_with_its_node(
    post: Post, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuyard.engines.cluster.submission_dir._WRITTEN_WITHIN_S", 0.0)
    attempts = post.hand_over(post.waiting(1))
    post.until_runs(1)
    [submission] = submissions(post)
    post.close()
    os.truncate(submission / "0.began", 0)
    site.forget_all()
    post.succeed(*attempts)
    assert post.until_ended(1)[0][0] is OutcomeKind.LOST


def test_terms_that_cannot_be_written_are_an_error(post: Post) -> None:
    strange = replace(TERMS, need=Need(model="t\udcff"))
    post.until(lambda: post.engine.offer().trouble is None, "the first offer")
    post.hand_over(post.launch(1, terms=strange))
    assert post.until_ended(1) == [UNBEGUN]
    assert "a bug" in (post.ends[1].outcome.reason or "")


def test_unsent_submissions_do_not_delay_reported_ends_while_the_site_is_down(post: Post, site: ProcessSite) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    site.down = True
    post.hand_over(*(post.launch(number, terms=replace(TERMS, priority=number)) for number in range(2, 12)))
    post.let_go(1)
    assert post.until_ended(1) == [SUCCEEDED]
    assert sum(call.startswith("submit") for call in site.calls) <= 2
    site.down = False
    assert set(post.until_ended(*range(2, 12))) <= {SUCCEEDED, UNBEGUN}


def test_a_job_handed_over_while_the_site_goes_down_is_given_the_reason(post: Post, site: GatedSite) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    with site.shut():
        site.down = True
        post.hand_over(post.launch(2))
    post.until(lambda: any(each.job_id == 2 and "connection refused" in each.reason for each in post.seen), "a reason")
    site.down = False
    post.let_go(1)
    assert post.until_ended(1, 2) == [SUCCEEDED, SUCCEEDED]


def test_a_site_that_no_job_waits_for_is_not_polled_again(post: Post, site: ProcessSite) -> None:
    site.down = True
    post.until(lambda: "connection refused" in (post.engine.offer().trouble or ""), "the trouble")
    looks = len(site.calls)
    post.until(lambda: len(site.calls) > looks or post.engine.offer(), "one more look, as it was asked for")

    def rests() -> bool:
        before = len(site.calls)
        select.select([], [], [], 0.5)  # longer than it ever waits between two looks
        return len(site.calls) == before

    post.until(rests, "rest")


def test_the_next_daemon_knows_the_site_s_id_of_a_submission(
    post: Post, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, report = site.submit, site.report
    known: list[str] = []

    def note(live: Sequence[ClusterSubmission]) -> SiteReport:
        known.extend(each.known_as for each in live)
        return report(live)

    monkeypatch.setattr(site, "submit", lambda submission: submit(submission) or "no. 17")
    attempts = post.hand_over(post.waiting(1))
    post.until_runs(1)
    monkeypatch.setattr(site, "report", note)
    post.succeed(*attempts)
    post.until(lambda: "no. 17" in known, "its name")
    post.let_go(1)
    assert post.until_ended(1) == [SUCCEEDED]


def test_an_attempt_whose_files_are_gone_for_good_is_lost_and_cancelled_at_the_site(
    post: Post, site: ProcessSite
) -> None:
    [attempt] = post.hand_over(post.waiting(1))
    post.until(lambda: post.seen and post.runs(1), "where it is")
    known = replace(attempt_of(1), site_id=post.seen[-1].site_id)
    assert attempt.key == known.key
    for submission in submissions(post):
        shutil.rmtree(submission)
    post.succeed(known)
    assert post.until_ended(1)[0][0] is OutcomeKind.LOST
    assert "cancel 1" in site.calls
