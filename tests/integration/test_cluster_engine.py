"""The outpost at a site of real processes: whatever fails, and whoever dies, each job runs once or never began."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from gpuyard.core.cluster.offer import Amount
from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.lease import Need
from gpuyard.engines.cluster.site import ClusterSubmission, Site
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.errors import EnvironmentFault, UserError
from tests.contract.cluster_engines import DAEMON, ROOT, hasten
from tests.contract.engine import DEADLINE_S, until
from tests.fakes.distant_site import DistantSite, SiteServer
from tests.fakes.site import ProcessSite
from tests.integration.cluster_engine_fixture import SUCCEEDED, TERMS, UNBEGUN, GatedSite, Post, attempt_of
from tests.scale import some

MANY = 50


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    slow_again = hasten()
    yield
    slow_again()


@pytest.fixture
def sites() -> Iterator[Callable[..., GatedSite]]:
    """Makes them; whatever runs there in the end is ended."""
    made: list[GatedSite] = []

    def make(most: int = 8, free: Amount | None = None) -> GatedSite:
        made.append(GatedSite(most=most, free=free))
        return made[-1]

    yield make
    for site in made:
        site.gate.set()
        site.close()


@pytest.fixture
def site(sites: Callable[..., GatedSite]) -> GatedSite:
    return sites()


@pytest.fixture
def post_at(tmp_path: Path, sites: Callable[..., GatedSite]) -> Iterator[Callable[[Site], Post]]:
    made: list[Post] = []

    def make(site: Site) -> Post:
        made.append(Post(tmp_path, site))
        return made[-1]

    yield make
    for post in made:
        post.close()


@pytest.fixture
def post(post_at: Callable[[Site], Post], site: GatedSite) -> Post:
    return post_at(site)


def submissions(site: ProcessSite) -> list[str]:
    return [call for call in site.calls if call.startswith("submit")]


# Parcels


def test_jobs_of_one_step_on_equal_terms_are_one_submission_and_each_runs_once(post: Post, site: ProcessSite) -> None:
    ids = range(1, MANY + 1)
    post.hand_over(*(post.launch(each, f"echo I am {each}") for each in ids))
    assert post.until_ended(*ids) == [SUCCEEDED] * MANY
    assert submissions(site) == [f"submit {MANY}"]
    assert [post.runs(each) for each in ids] == [1] * MANY
    log = post.folder / "shared/logs/7.1.log"
    assert (log.read_text(), log.stat().st_mode & 0o077) == ("I am 7\n", 0)


def test_jobs_on_different_terms_are_separate_submissions_of_limited_size(
    post: Post, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "most_in_submission", 3)
    other = replace(TERMS, priority=5)
    post.hand_over(*(post.launch(each, terms=TERMS if each % 2 else other) for each in range(1, 10)))
    assert post.until_ended(*range(1, 10)) == [SUCCEEDED] * 9
    assert sorted(submissions(site)) == ["submit 1", "submit 2", "submit 3", "submit 3"]


def test_a_submission_directory_stays_until_the_ends_of_all_its_jobs_are_recorded(post: Post) -> None:
    post.hand_over(post.launch(1), post.waiting(2))
    post.until_ended(1)
    post.until_runs(2)
    post.listen()
    assert len(post.submissions()) == 1
    post.let_go(2)
    post.until_ended(2)
    assert len(post.submissions()) == 1, "it is told, and not recorded"
    post.until(lambda: not post.submissions(), "the end of the submission")


def test_only_the_owner_can_read_a_submission(post: Post) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    [submission] = post.submissions()
    assert all(not path.stat().st_mode & 0o077 for path in (submission, *submission.glob("*.json")))
    post.let_go(1)
    post.until_ended(1)


# What is offered


def test_capacity_handed_over_is_not_offered_again_before_the_next_report(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], Post]
) -> None:
    site = sites(free=Amount(gpus=2.0, cpus=8.0))
    post = post_at(site)
    post.until(lambda: not post.trouble(), "the first offer")
    with site.shut():
        post.hand_over(post.launch(1, terms=replace(TERMS, need=Need(devices=1), cpus=3)))
        assert post.engine.offer().free == Amount(gpus=1.0, cpus=5.0)
        post.hand_over(post.launch(2, terms=replace(TERMS, need=Need(devices=1))))
        assert post.engine.offer().free == Amount(gpus=0.0, cpus=4.0)
    post.until_ended(1, 2)
    post.until(lambda: post.engine.offer().free == site.free, "what the site says now")


# A site that is down, or says no


def test_a_job_that_the_site_did_not_accept_never_started_and_may_be_submitted_again(
    post: Post, site: ProcessSite
) -> None:
    post.until(lambda: not post.trouble(), "the first offer")
    site.down = True
    post.hand_over(post.launch(1))
    post.until(lambda: any("connection refused" in each.reason for each in post.seen), "why it waits")
    assert "yonder cannot be reached: connection refused (wait)" in post.trouble()
    assert post.ends == {}
    site.down = False
    assert post.until_ended(1) == [UNBEGUN]
    del post.ends[1]
    post.hand_over(post.launch(1))
    assert post.until_ended(1) == [SUCCEEDED]
    assert post.runs(1) == 1


def test_a_job_accepted_without_an_answer_runs_once(post: Post, site: ProcessSite) -> None:
    site.loses_answer = True
    post.hand_over(*(post.launch(each) for each in range(1, 6)))
    assert post.until_ended(*range(1, 6)) == [SUCCEEDED] * 5
    assert [post.runs(each) for each in range(1, 6)] == [1] * 5
    assert submissions(site) == ["submit 5"]


def test_a_success_is_reported_while_the_site_is_down_and_a_failure_once_it_is_back(
    post: Post, site: ProcessSite
) -> None:
    post.hand_over(
        post.waiting(1), replace(post.waiting(2), command=("sh", "-c", f"read w <{post.folder}/pipe2; exit 3"))
    )
    post.until(lambda: len({each.job_id for each in post.seen if each.place}) == 2, "that both run")
    site.down = True
    post.let_go(1)
    post.let_go(2)
    assert post.until_ended(1) == [SUCCEEDED]
    post.until(post.trouble, "that the site is missed")
    assert 2 not in post.ends
    site.down = False
    assert post.until_ended(2) == [(OutcomeKind.FAILED, 3)]


def test_waiting_and_running_jobs_continue_after_the_site_was_down(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], Post]
) -> None:
    site = sites(most=1)
    post = post_at(site)
    post.hand_over(post.waiting(1), post.launch(2))
    post.until_runs(1)
    site.down = True
    post.until(post.trouble, "that the site is missed")
    site.down = False
    post.let_go(1)
    assert post.until_ended(1, 2) == [SUCCEEDED, SUCCEEDED]
    assert (post.runs(1), post.runs(2)) == (1, 1)


def test_a_refusal_is_quoted_from_the_site_and_other_jobs_continue(post: Post, site: ProcessSite) -> None:
    site.refuses = "there is no partition 'gpu'"
    post.hand_over(post.launch(1), post.launch(2))
    assert post.until_ended(1, 2) == [UNBEGUN, UNBEGUN]
    assert post.ends[1].outcome.reason == "there is no partition 'gpu'"
    assert post.submissions() == []
    site.refuses = None
    post.hand_over(post.launch(3))
    assert post.until_ended(3) == [SUCCEEDED]
    assert post.runs(1) == post.runs(2) == 0


def test_a_refused_job_that_is_submitted_again_is_not_treated_as_recorded(post: Post, site: GatedSite) -> None:
    """What is recorded is forgotten by its name, and the name is the same."""
    site.refuses = "not now"
    post.hand_over(post.launch(1))
    post.until_ended(1)
    site.refuses = None
    post.hand_over(post.waiting(2))
    with site.shut():
        post.engine.ended()
        post.hand_over(post.waiting(1))
    post.until_runs(1, 2)
    assert len(post.submissions()) == 2
    post.let_go(1)
    del post.ends[1]
    assert post.until_ended(1) == [SUCCEEDED]
    post.let_go(2)
    post.until_ended(2)


def test_a_site_with_a_bug_loses_nothing(post: Post, site: ProcessSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(submission: ClusterSubmission) -> None:
        raise KeyError(submission.token)

    post.until(lambda: not post.trouble(), "the first offer")
    monkeypatch.setattr(site, "submit", submit)
    post.hand_over(post.launch(1), post.launch(2, terms=replace(TERMS, priority=5)))
    assert post.until_ended(1, 2) == [UNBEGUN, UNBEGUN]
    monkeypatch.undo()
    post.hand_over(post.launch(3))
    assert post.until_ended(3) == [SUCCEEDED]


# Cancelling


def test_running_and_waiting_jobs_are_cancelled_at_the_site(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], Post]
) -> None:
    site = sites(most=1)
    post = post_at(site)
    running, waiting = post.hand_over(post.waiting(1), post.launch(2))
    post.until_runs(1)
    assert post.engine.signal(waiting, signal.SIGTERM) == 1
    assert post.until_ended(2) == [(OutcomeKind.CANCELLED, None)]
    assert post.engine.signal(running, signal.SIGTERM) == 1
    assert post.until_ended(1) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]
    assert (post.runs(1), post.runs(2)) == (1, 0)
    assert post.engine.signal(running, signal.SIGTERM) == 0


def test_a_job_cancelled_before_it_is_sent_is_never_sent(post: Post, site: GatedSite) -> None:
    post.hand_over(post.waiting(9))
    with site.shut():
        first, _ = post.hand_over(post.launch(1), post.launch(2))
        assert post.engine.signal(first, signal.SIGTERM) == 1
    assert post.until_ended(1, 2) == [UNBEGUN, SUCCEEDED]
    assert submissions(site) == ["submit 1", "submit 1"]
    assert post.runs(1) == 0
    post.let_go(9)
    post.until_ended(9)


def test_a_job_cancelled_while_the_site_is_down_ends_once_it_is_back(post: Post, site: ProcessSite) -> None:
    [attempt] = post.hand_over(post.waiting(1))
    post.until_runs(1)
    post.hand_over(post.waiting(2))
    post.until_runs(2)
    site.down = True
    post.engine.signal(attempt, signal.SIGTERM)
    post.let_go(2)
    assert post.until_ended(2) == [SUCCEEDED], "ends are heard of meanwhile"
    post.until(post.trouble, "that the site is missed")
    site.down = False
    assert post.until_ended(1) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]


def test_a_site_that_is_down_is_asked_less_and_less_often(post: Post, site: ProcessSite) -> None:
    [attempt] = post.hand_over(post.waiting(1))
    post.until(lambda: any(each.place for each in post.seen), "that it runs")
    site.down = True
    post.engine.signal(attempt, signal.SIGTERM)
    before = len(site.calls)
    began = time.monotonic()
    post.until(lambda: time.monotonic() > began + 0.6, "some time")
    assert len(site.calls) - before < 9, "asked at each tick it would be twelve and more"
    site.down = False
    post.until_ended(1)


# Daemons that die


@pytest.mark.parametrize(
    ("dies", "comes_to"),
    some([("before submit", UNBEGUN), ("after submit", SUCCEEDED), ("when all is there", SUCCEEDED)], 0, 1),
)
def test_whenever_a_daemon_is_killed_the_next_one_adopts_all_it_submitted(
    tmp_path: Path,
    sites: Callable[..., GatedSite],
    post_at: Callable[[Site], Post],
    dies: str,
    comes_to: tuple[OutcomeKind, int | None],
) -> None:
    site = sites(most=25)
    server = SiteServer(site, str(tmp_path / "site"))
    post = post_at(DistantSite(str(tmp_path / "site")))
    ids = range(1, MANY + 1)
    launches = msgspec.json.encode([post.launch(each) for each in ids]).decode()
    maker = "tests.fakes.distant_site:mortal"
    call = [sys.executable, "-c", DAEMON, str(tmp_path / "shared"), maker, f"{tmp_path}/site:{dies}", "begin", launches]
    killed = subprocess.run(call, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    post.succeed(*map(attempt_of, ids))
    assert post.until_ended(*ids) == [comes_to] * MANY
    assert [post.runs(each) for each in ids] == [int(comes_to == SUCCEEDED)] * MANY
    assert submissions(site) == [f"submit {MANY}"] * (comes_to == SUCCEEDED)
    post.until(lambda: not post.submissions(), "the end of the submission")
    server.close()


def test_adopting_waits_for_a_missing_shared_folder(post: Post, site: ProcessSite) -> None:
    """Without it nobody knows what was handed over: it may run."""
    attempts = post.hand_over(post.waiting(1), post.waiting(2))
    post.until_runs(1, 2)
    shared, away = post.folder / "shared", post.folder / "away"
    shared.rename(away)
    post.succeed(*attempts)
    post.until(lambda: "is missing" in post.trouble(), "that the folder is missed")
    assert post.engine.signal(attempts[1], signal.SIGTERM) == 1
    assert post.ends == {}
    away.rename(shared)
    assert post.until_ended(2) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]
    post.let_go(1)
    assert post.until_ended(1) == [SUCCEEDED]
    assert post.runs(1) == post.runs(2) == 1


def test_adopting_reports_a_job_that_failed_meanwhile(post: Post) -> None:
    attempts = post.hand_over(post.launch(1, "exit 3"))
    until(lambda: [*post.folder.glob("shared/yonder/parcels/*/0.ended")], "its word")
    post.succeed(*attempts)
    assert post.until_ended(1) == [(OutcomeKind.FAILED, 3)]
    assert any(each.place for each in post.seen)


# What is lost


def test_after_a_cluster_restart_running_jobs_are_lost_and_waiting_jobs_never_started(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], Post]
) -> None:
    site = sites(most=2)
    post = post_at(site)
    post.hand_over(post.waiting(1), post.waiting(2), post.launch(3))
    post.until_runs(1, 2)
    site.forget_all()
    assert post.until_ended(1, 2, 3) == [(OutcomeKind.LOST, None), (OutcomeKind.LOST, None), UNBEGUN]
    assert [post.runs(each) for each in (1, 2, 3)] == [1, 1, 0]
    post.hand_over(post.launch(4))
    assert post.until_ended(4) == [SUCCEEDED]


def test_a_job_that_the_site_lost_track_of_is_killed_though_its_end_is_recorded_at_once(
    post: Post, site: ProcessSite
) -> None:
    """Nothing of it may go on beside its next attempt."""
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    mine = [process for process in psutil.process_iter(["cmdline"]) if f"{post.folder}/pipe1" in _line(process)]
    assert mine
    site.lose_track()
    assert post.until_ended(1) == [(OutcomeKind.LOST, None)]
    post.until(lambda: not any(map(_is_alive, mine)), "the end of what was lost")


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# A folder that comes and goes, or takes nothing


def test_a_shared_folder_missing_for_a_while_loses_nothing(post: Post) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    shared, away = post.folder / "shared", post.folder / "away"
    shared.rename(away)
    post.until(lambda: "parcels" in post.trouble(), "that the folder is missed")
    assert post.ends == {}
    post.let_go(1)
    away.rename(shared)
    assert post.until_ended(1) == [SUCCEEDED]
    post.until(lambda: not post.trouble(), "that all is well")


def test_an_observed_end_is_reported_even_when_the_next_submission_is_broken(post: Post, site: GatedSite) -> None:
    post.hand_over(post.waiting(1))
    post.until_runs(1)
    [first] = post.submissions()
    post.hand_over(post.waiting(2, replace(TERMS, priority=5)))
    post.until_runs(2)
    [second] = [submission for submission in post.submissions() if submission != first]
    with site.shut():
        post.let_go(1)
        until((first / "0.ended").exists, "the word of the first")
        second.rename(post.folder / "away")
    assert post.until_ended(1) == [SUCCEEDED]
    (post.folder / "away").rename(second)
    post.let_go(2)
    assert post.until_ended(2) == [SUCCEEDED]


def test_a_folder_that_cannot_be_created_is_an_error_before_anything_is_submitted(post: Post) -> None:
    (post.folder / "shared").write_text("no folder")
    with pytest.raises(EnvironmentFault, match="shared"):
        post.engine.prepare(post.launch(1), None)
    (post.folder / "shared").unlink()
    post.hand_over(post.launch(1))
    assert post.until_ended(1) == [SUCCEEDED]


def test_a_submission_that_cannot_be_written_never_started(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr(SubmissionDirs, "write", write)
    post.hand_over(post.launch(1))
    assert post.until_ended(1) == [UNBEGUN]
    assert post.ends[1].outcome.reason == "the disk is full"


def test_an_accepted_job_runs_once_even_when_that_cannot_be_recorded(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark_submitted(*_: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr(SubmissionDirs, "mark_submitted", mark_submitted)
    post.hand_over(post.launch(1))
    assert post.until_ended(1) == [SUCCEEDED]
    assert post.runs(1) == 1


def test_an_invalid_environment_is_refused_before_anything_is_submitted(post: Post, site: ProcessSite) -> None:
    with pytest.raises(UserError):
        post.engine.prepare(replace(post.launch(1), environment={"": "x"}), None)
    post.engine.start_prepared()
    assert submissions(site) == []
