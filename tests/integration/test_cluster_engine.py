"""The cluster engine with a site of real processes: after any failure or kill, each job runs once or never started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, Site, SiteState
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.cluster_terms import Amount
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.model.lease import Need
from tests.contract.cluster_engines import DAEMON, ROOT, hasten
from tests.contract.engine import DEADLINE_S, until
from tests.fakes.distant_site import DistantSite, SiteServer
from tests.fakes.site import ProcessSite
from tests.integration.cluster_engine_fixture import (
    NEVER_STARTED,
    SUCCEEDED,
    TERMS,
    EngineHarness,
    GatedSite,
    attempt_of,
)
from tests.scale import some

MANY = 50


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    slow_again = hasten()
    yield
    slow_again()


@pytest.fixture
def sites() -> Iterator[Callable[..., GatedSite]]:
    """Make engines; end at last what still runs at the site."""
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
def post_at(tmp_path: Path, sites: Callable[..., GatedSite]) -> Iterator[Callable[[Site], EngineHarness]]:
    made: list[EngineHarness] = []

    def make(site: Site) -> EngineHarness:
        made.append(EngineHarness(tmp_path, site))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def harness(post_at: Callable[[Site], EngineHarness], site: GatedSite) -> EngineHarness:
    return post_at(site)


def submissions(site: ProcessSite) -> list[str]:
    return [call for call in site.calls if call.startswith("submit")]


# Submissions


def test_jobs_of_one_step_on_equal_terms_are_one_submission_and_each_runs_once(
    harness: EngineHarness, site: ProcessSite
) -> None:
    ids = range(1, MANY + 1)
    harness.hand_over(*(harness.launch(each, f"echo I am {each}") for each in ids))
    assert harness.until_ended(*ids) == [SUCCEEDED] * MANY
    assert submissions(site) == [f"submit {MANY}"]
    assert [harness.runs(each) for each in ids] == [1] * MANY
    log = harness.folder / "shared/logs/7.1.log"
    assert (log.read_text(), log.stat().st_mode & 0o077) == ("I am 7\n", 0)


def test_jobs_on_different_terms_are_separate_submissions_of_limited_size(
    harness: EngineHarness, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "most_in_submission", 3)
    other = replace(TERMS, priority=5)
    harness.hand_over(*(harness.launch(each, terms=TERMS if each % 2 else other) for each in range(1, 10)))
    assert harness.until_ended(*range(1, 10)) == [SUCCEEDED] * 9
    assert sorted(submissions(site)) == ["submit 1", "submit 2", "submit 3", "submit 3"]


def test_a_submission_directory_stays_until_the_ends_of_all_its_jobs_are_recorded(harness: EngineHarness) -> None:
    harness.hand_over(harness.launch(1), harness.waiting(2))
    harness.until_ended(1)
    harness.until_runs(2)
    harness.listen()
    assert len(harness.submissions()) == 1
    harness.let_go(2)
    harness.until_ended(2)
    assert len(harness.submissions()) == 1, "the end is reported, but not recorded"
    harness.until(lambda: not harness.submissions(), "the end of the submission")


# Offers


def test_the_files_that_a_user_names_are_logs_and_are_searched_for_a_lack_of_memory(harness: EngineHarness) -> None:
    out, ran_out = harness.folder / "out", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    launch = replace(harness.launch(1, f"echo '{ran_out}' >&2; exit 1"), output=str(out), split_stderr=True)
    prepared = harness.engine.prepare(launch, None)
    harness.engine.start_prepared()
    assert prepared.log == str(out)
    assert harness.until_ended(1) == [(OutcomeKind.FAILED, 1)]
    assert harness.ends[1].shortage is not None
    assert Path(prepared.error_log or "").read_text() == f"{ran_out}\n"
    assert out.read_text() == ""


def test_capacity_handed_over_is_not_offered_again_before_the_next_report(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], EngineHarness]
) -> None:
    site = sites(free=Amount(gpus=2.0, cpus=8.0))
    harness = post_at(site)
    harness.until(lambda: not harness.trouble(), "the first offer")
    with site.shut():
        harness.hand_over(harness.launch(1, terms=replace(TERMS, need=Need(devices=1), cpus=3)))
        assert harness.engine.offer().free == Amount(gpus=1.0, cpus=5.0)
        harness.hand_over(harness.launch(2, terms=replace(TERMS, need=Need(devices=1))))
        assert harness.engine.offer().free == Amount(gpus=0.0, cpus=4.0)
    harness.until_ended(1, 2)
    harness.until(lambda: harness.engine.offer().free == site.free, "the new offer of the site")


# A site that is down, or refuses


def test_a_job_that_the_site_did_not_accept_never_started_and_may_be_submitted_again(
    harness: EngineHarness, site: ProcessSite
) -> None:
    harness.until(lambda: not harness.trouble(), "the first offer")
    site.down = True
    harness.hand_over(harness.launch(1))
    harness.until(lambda: any("connection refused" in each.reason for each in harness.statuses), "why it waits")
    assert "yonder cannot be reached: connection refused (wait)" in harness.trouble()
    assert harness.ends == {}
    site.down = False
    assert harness.until_ended(1) == [NEVER_STARTED]
    del harness.ends[1]
    harness.hand_over(harness.launch(1))
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(1) == 1


def test_a_job_accepted_without_an_answer_runs_once(harness: EngineHarness, site: ProcessSite) -> None:
    site.loses_answer = True
    harness.hand_over(*(harness.launch(each) for each in range(1, 6)))
    assert harness.until_ended(*range(1, 6)) == [SUCCEEDED] * 5
    assert [harness.runs(each) for each in range(1, 6)] == [1] * 5
    assert submissions(site) == ["submit 5"]


def test_a_success_is_reported_while_the_site_is_down_and_a_failure_once_it_is_back(
    harness: EngineHarness, site: ProcessSite
) -> None:
    harness.hand_over(
        harness.waiting(1), replace(harness.waiting(2), command=("sh", "-c", f"read w <{harness.folder}/pipe2; exit 3"))
    )
    harness.until(lambda: len({each.job_id for each in harness.statuses if each.place}) == 2, "that both run")
    site.down = True
    harness.let_go(1)
    harness.let_go(2)
    assert harness.until_ended(1) == [SUCCEEDED]
    harness.until(harness.trouble, "that the site is missed")
    assert 2 not in harness.ends
    site.down = False
    assert harness.until_ended(2) == [(OutcomeKind.FAILED, 3)]


def test_waiting_and_running_jobs_continue_after_the_site_was_down(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], EngineHarness]
) -> None:
    site = sites(most=1)
    harness = post_at(site)
    harness.hand_over(harness.waiting(1), harness.launch(2))
    harness.until_runs(1)
    site.down = True
    harness.until(harness.trouble, "that the site is missed")
    site.down = False
    harness.let_go(1)
    assert harness.until_ended(1, 2) == [SUCCEEDED, SUCCEEDED]
    assert (harness.runs(1), harness.runs(2)) == (1, 1)


def test_a_refusal_is_quoted_from_the_site_and_other_jobs_continue(harness: EngineHarness, site: ProcessSite) -> None:
    site.refuses = "there is no partition 'gpu'"
    harness.hand_over(harness.launch(1), harness.launch(2))
    assert harness.until_ended(1, 2) == [NEVER_STARTED, NEVER_STARTED]
    assert harness.ends[1].outcome.reason == "there is no partition 'gpu'"
    assert harness.submissions() == []
    site.refuses = None
    harness.hand_over(harness.launch(3))
    assert harness.until_ended(3) == [SUCCEEDED]
    assert harness.runs(1) == harness.runs(2) == 0


def test_a_refused_job_that_is_submitted_again_is_not_treated_as_recorded(
    harness: EngineHarness, site: GatedSite
) -> None:
    """Recorded attempts are forgotten by name, and the new attempt has the same name."""
    site.refuses = "not now"
    harness.hand_over(harness.launch(1))
    harness.until_ended(1)
    site.refuses = None
    harness.hand_over(harness.waiting(2))
    with site.shut():
        harness.engine.ended()
        harness.hand_over(harness.waiting(1))
    harness.until_runs(1, 2)
    assert len(harness.submissions()) == 2
    harness.let_go(1)
    del harness.ends[1]
    assert harness.until_ended(1) == [SUCCEEDED]
    harness.let_go(2)
    harness.until_ended(2)


def test_a_site_with_a_bug_loses_nothing(
    harness: EngineHarness, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(submission: ClusterSubmission) -> None:
        raise KeyError(submission.token)

    harness.until(lambda: not harness.trouble(), "the first offer")
    monkeypatch.setattr(site, "submit", submit)
    harness.hand_over(harness.launch(1), harness.launch(2, terms=replace(TERMS, priority=5)))
    assert harness.until_ended(1, 2) == [NEVER_STARTED, NEVER_STARTED]
    monkeypatch.undo()
    harness.hand_over(harness.launch(3))
    assert harness.until_ended(3) == [SUCCEEDED]


# Cancelling


def test_running_and_waiting_jobs_are_cancelled_at_the_site(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], EngineHarness]
) -> None:
    site = sites(most=1)
    harness = post_at(site)
    running, waiting = harness.hand_over(harness.waiting(1), harness.launch(2))
    harness.until_runs(1)
    assert harness.engine.signal(waiting, signal.SIGTERM) == 1
    assert harness.until_ended(2) == [(OutcomeKind.CANCELLED, None)]
    assert harness.engine.signal(running, signal.SIGTERM) == 1
    assert harness.until_ended(1) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]
    assert (harness.runs(1), harness.runs(2)) == (1, 0)
    assert harness.engine.signal(running, signal.SIGTERM) == 0


def test_a_job_cancelled_before_it_is_sent_is_never_sent(harness: EngineHarness, site: GatedSite) -> None:
    harness.hand_over(harness.waiting(9))
    with site.shut():
        first, _ = harness.hand_over(harness.launch(1), harness.launch(2))
        assert harness.engine.signal(first, signal.SIGTERM) == 1
    assert harness.until_ended(1, 2) == [NEVER_STARTED, SUCCEEDED]
    assert submissions(site) == ["submit 1", "submit 1"]
    assert harness.runs(1) == 0
    harness.let_go(9)
    harness.until_ended(9)


def test_a_job_cancelled_while_the_site_is_down_ends_once_it_is_back(harness: EngineHarness, site: ProcessSite) -> None:
    [attempt] = harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    harness.hand_over(harness.waiting(2))
    harness.until_runs(2)
    site.down = True
    harness.engine.signal(attempt, signal.SIGTERM)
    harness.let_go(2)
    assert harness.until_ended(2) == [SUCCEEDED], "ends are reported meanwhile"
    harness.until(harness.trouble, "that the site is missed")
    site.down = False
    assert harness.until_ended(1) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]


# Taking back


@pytest.fixture
def narrow(sites: Callable[..., GatedSite]) -> GatedSite:
    """A site that runs one element at a time."""
    return sites(most=1)


@pytest.fixture
def running_and_waiting(narrow: GatedSite, post_at: Callable[[Site], EngineHarness]) -> tuple[EngineHarness, Attempt]:
    """Job 1 runs until it is let go, and job 2 waits at the site. Return its attempt, too."""
    harness = post_at(narrow)
    _, waiting = harness.hand_over(harness.waiting(1), harness.launch(2))
    harness.until_runs(1)
    harness.until(lambda: any(each.job_id == 2 and each.site_id for each in harness.statuses), "job 2 at the site")
    return harness, waiting


def test_a_job_that_waits_is_taken_back_and_one_that_runs_goes_on(
    running_and_waiting: tuple[EngineHarness, Attempt], narrow: GatedSite
) -> None:
    harness, waiting = running_and_waiting
    harness.engine.withdraw(attempt_of(1))
    harness.engine.withdraw(waiting)
    assert harness.until_ended(2) == [NEVER_STARTED]
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    harness.hand_over(harness.launch(2))
    assert harness.until_ended(2) == [NEVER_STARTED], "the end before"
    harness.ends.clear()
    assert harness.until_ended(2) == [SUCCEEDED], "handed over again under its key"
    assert (harness.runs(1), harness.runs(2)) == (1, 1)


def test_a_job_that_begins_as_it_is_taken_back_runs_once(
    running_and_waiting: tuple[EngineHarness, Attempt], narrow: GatedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, waiting = running_and_waiting
    [token] = [folder.name for folder in harness.submissions()]
    states = (SiteState.RUNNING, SiteState.PENDING)
    sightings = {(token, number): Sighting(id=str(number), at=at) for number, at in enumerate(states)}
    current = narrow.report
    monkeypatch.setattr(narrow, "report", lambda live: replace(current(live), sightings=sightings))
    harness.let_go(1)
    until(lambda: harness.runs(2), "its program, of which the site does not tell yet")
    harness.engine.withdraw(waiting)
    monkeypatch.setattr(narrow, "report", current)
    assert harness.until_ended(1, 2) == [SUCCEEDED, SUCCEEDED]
    assert harness.runs(2) == 1


def test_the_site_cannot_begin_a_job_that_is_being_taken_back(
    running_and_waiting: tuple[EngineHarness, Attempt], narrow: GatedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, waiting = running_and_waiting
    narrow_cancel = narrow.cancel

    def begin_it_first(ids: Sequence[str]) -> None:
        monkeypatch.setattr(narrow, "_most", 2)
        GatedSite.report(narrow, ())
        narrow_cancel(ids)

    monkeypatch.setattr(narrow, "cancel", begin_it_first)
    harness.engine.withdraw(waiting)
    assert harness.until_ended(2) == [NEVER_STARTED]
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(2) == 0


def test_a_job_is_taken_back_while_the_site_is_down(
    running_and_waiting: tuple[EngineHarness, Attempt], narrow: GatedSite
) -> None:
    harness, waiting = running_and_waiting
    narrow.down = True
    harness.engine.withdraw(waiting)
    assert harness.until_ended(2) == [NEVER_STARTED]
    harness.until(harness.trouble, "that the site is missed")
    narrow.calls.clear()
    narrow.down = False
    harness.until(lambda: "cancel 1" in narrow.calls, "that it is cancelled there, too")
    harness.let_go(1)
    harness.until_ended(1)
    assert harness.runs(2) == 0


def test_a_job_that_a_killed_daemon_took_back_never_started(
    running_and_waiting: tuple[EngineHarness, Attempt], narrow: GatedSite
) -> None:
    harness, waiting = running_and_waiting
    harness.engine.withdraw(waiting)
    until(lambda: list(harness.submissions()[0].glob("1.started")), "that it is kept from starting")
    harness.take_over(attempt_of(1), replace(waiting, site_id="its name there"))
    assert harness.until_ended(2) == [NEVER_STARTED]
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(2) == 0


def test_a_site_that_is_down_is_asked_less_and_less_often(harness: EngineHarness, site: ProcessSite) -> None:
    [attempt] = harness.hand_over(harness.waiting(1))
    harness.until(lambda: any(each.place for each in harness.statuses), "that it runs")
    site.down = True
    harness.engine.signal(attempt, signal.SIGTERM)
    before = len(site.calls)
    began = time.monotonic()
    harness.until(lambda: time.monotonic() > began + 0.6, "some time")
    assert len(site.calls) - before < 9, "asked at each tick it would be twelve and more"
    site.down = False
    harness.until_ended(1)


# Daemons that are killed


@pytest.mark.parametrize(
    ("dies", "comes_to"),
    some([("before submit", NEVER_STARTED), ("after submit", SUCCEEDED), ("when all is there", SUCCEEDED)], 0, 1),
)
def test_whenever_a_daemon_is_killed_the_next_one_adopts_all_it_submitted(
    tmp_path: Path,
    sites: Callable[..., GatedSite],
    post_at: Callable[[Site], EngineHarness],
    dies: str,
    comes_to: tuple[OutcomeKind, int | None],
) -> None:
    site = sites(most=25)
    server = SiteServer(site, str(tmp_path / "site"))
    harness = post_at(DistantSite(str(tmp_path / "site")))
    ids = range(1, MANY + 1)
    launches = msgspec.json.encode([harness.launch(each) for each in ids]).decode()
    maker = "tests.fakes.distant_site:mortal"
    call = [sys.executable, "-c", DAEMON, str(tmp_path / "shared"), maker, f"{tmp_path}/site:{dies}", "begin", launches]
    killed = subprocess.run(call, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    harness.take_over(*map(attempt_of, ids))
    assert harness.until_ended(*ids) == [comes_to] * MANY
    assert [harness.runs(each) for each in ids] == [int(comes_to == SUCCEEDED)] * MANY
    assert submissions(site) == [f"submit {MANY}"] * (comes_to == SUCCEEDED)
    harness.until(lambda: not harness.submissions(), "the end of the submission")
    server.close()


def test_adopting_waits_for_a_missing_shared_folder(harness: EngineHarness, site: ProcessSite) -> None:
    """Without the folder the engine cannot know what was submitted: it may run."""
    attempts = harness.hand_over(harness.waiting(1), harness.waiting(2))
    harness.until_runs(1, 2)
    shared, away = harness.folder / "shared", harness.folder / "away"
    shared.rename(away)
    harness.take_over(*attempts)
    harness.until(lambda: "is missing" in harness.trouble(), "that the folder is missed")
    assert harness.engine.signal(attempts[1], signal.SIGTERM) == 1
    assert harness.ends == {}
    away.rename(shared)
    assert harness.until_ended(2) == [(OutcomeKind.FAILED, 128 + signal.SIGTERM)]
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(1) == harness.runs(2) == 1


def test_adopting_reports_a_job_that_failed_meanwhile(harness: EngineHarness) -> None:
    attempts = harness.hand_over(harness.launch(1, "exit 3"))
    until(lambda: [*harness.folder.glob("shared/yonder/submissions/*/0.ended")], "the record of its end")
    harness.take_over(*attempts)
    assert harness.until_ended(1) == [(OutcomeKind.FAILED, 3)]
    assert any(each.place for each in harness.statuses)


def test_an_attempt_that_was_submitted_again_is_adopted_from_its_last_submission(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], EngineHarness]
) -> None:
    harness = post_at(sites(most=2))
    first, _, again = harness.hand_over(harness.waiting(1), harness.waiting(2), harness.waiting(3))
    harness.until_runs(1, 2)
    (folder,) = harness.submissions()
    # As its supervisor, where no log can be written.
    (folder / "2.started").write_text('{"at": 1.0, "node": "n1", "pid": 1}')
    (folder / "2.ended").write_text('{"word": "unbegun-log-enospc", "at": 2.0}')
    assert harness.until_ended(3) == [NEVER_STARTED]
    del harness.ends[3]
    harness.let_go(2)
    assert harness.until_ended(2) == [SUCCEEDED]
    harness.hand_over(harness.waiting(3))
    harness.until_runs(3)
    harness.take_over(first, again)
    harness.let_go(3)
    assert harness.until_ended(3) == [SUCCEEDED]
    harness.let_go(1)
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(1) == harness.runs(3) == 1


# Lost jobs


def test_after_a_cluster_restart_running_jobs_are_lost_and_waiting_jobs_never_started(
    sites: Callable[..., GatedSite], post_at: Callable[[Site], EngineHarness]
) -> None:
    site = sites(most=2)
    harness = post_at(site)
    harness.hand_over(harness.waiting(1), harness.waiting(2), harness.launch(3))
    harness.until_runs(1, 2)
    site.forget_all()
    assert harness.until_ended(1, 2, 3) == [(OutcomeKind.LOST, None), (OutcomeKind.LOST, None), NEVER_STARTED]
    assert [harness.runs(each) for each in (1, 2, 3)] == [1, 1, 0]
    harness.hand_over(harness.launch(4))
    assert harness.until_ended(4) == [SUCCEEDED]


def test_a_job_that_the_site_lost_track_of_is_killed_before_its_end_is_reported(
    harness: EngineHarness, site: ProcessSite
) -> None:
    """No process of it may run beside its next attempt."""
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    mine = [process for process in psutil.process_iter(["cmdline"]) if f"{harness.folder}/pipe1" in _line(process)]
    assert mine
    site.lose_track()
    assert harness.until_ended(1) == [(OutcomeKind.LOST, None)]
    assert not any(map(_is_alive, mine))


def test_a_job_that_succeeds_after_the_site_lost_it_has_succeeded(harness: EngineHarness, site: ProcessSite) -> None:
    """Whether its supervisor kills it in time or not, it does not complete twice."""
    folder = harness.folder
    launches = [
        harness.launch(each, f"read word <{folder}/pipe{each}; touch {folder}/done{each}") for each in range(1, 5)
    ]
    for each in range(1, 5):
        os.mkfifo(folder / f"pipe{each}")
    harness.hand_over(*launches)
    harness.until_runs(*range(1, 5))
    site.lose_track()
    mine = [process for process in psutil.process_iter(["cmdline"]) if f"{folder}/pipe" in _line(process)]
    given_up = folder / "shared" / site.name / "submissions"
    harness.until(lambda: any(given_up.glob("*/0.lost")), "that the engine gives it up")
    for each in range(1, 5):
        with contextlib.suppress(OSError):
            pipe = os.open(folder / f"pipe{each}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"go\n")
            os.close(pipe)
    ends = harness.until_ended(*range(1, 5))
    harness.until(lambda: not any(map(_is_alive, mine)), "the end of all of them")
    are_done = [(folder / f"done{each}").exists() for each in range(1, 5)]
    assert ends == [SUCCEEDED if is_done else (OutcomeKind.LOST, None) for is_done in are_done]


def test_a_job_whose_supervisor_says_nothing_is_lost_after_a_while(
    harness: EngineHarness, site: ProcessSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    site.forget_all()
    begun = time.monotonic()
    assert harness.until_ended(1) == [(OutcomeKind.LOST, None)]
    assert "no longer knows it" in (harness.ends[1].outcome.reason or "")
    assert time.monotonic() - begun > SubmissionDirs(harness.folder).stops_within_s()


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# A shared folder that is missing for a while, or not writable


def test_a_shared_folder_missing_for_a_while_loses_nothing(harness: EngineHarness) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    shared, away = harness.folder / "shared", harness.folder / "away"
    shared.rename(away)
    harness.until(lambda: "submissions" in harness.trouble(), "that the folder is missed")
    assert harness.ends == {}
    harness.let_go(1)
    away.rename(shared)
    assert harness.until_ended(1) == [SUCCEEDED]
    harness.until(lambda: not harness.trouble(), "that all is well")


def test_an_observed_end_is_reported_even_when_the_next_submission_is_broken(
    harness: EngineHarness, site: GatedSite
) -> None:
    harness.hand_over(harness.waiting(1))
    harness.until_runs(1)
    [first] = harness.submissions()
    harness.hand_over(harness.waiting(2, replace(TERMS, priority=5)))
    harness.until_runs(2)
    [second] = [submission for submission in harness.submissions() if submission != first]
    with site.shut():
        harness.let_go(1)
        until((first / "0.ended").exists, "the record of the first")
        second.rename(harness.folder / "away")
    assert harness.until_ended(1) == [SUCCEEDED]
    (harness.folder / "away").rename(second)
    harness.let_go(2)
    assert harness.until_ended(2) == [SUCCEEDED]


def test_a_folder_that_cannot_be_created_is_an_error_before_anything_is_submitted(harness: EngineHarness) -> None:
    (harness.folder / "shared").write_text("no folder")
    with pytest.raises(EnvironmentFault, match="shared"):
        harness.engine.prepare(harness.launch(1), None)
    (harness.folder / "shared").unlink()
    harness.hand_over(harness.launch(1))
    assert harness.until_ended(1) == [SUCCEEDED]


def test_a_submission_that_cannot_be_written_never_started(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr(SubmissionDirs, "write", write)
    harness.hand_over(harness.launch(1))
    assert harness.until_ended(1) == [NEVER_STARTED]
    assert harness.ends[1].outcome.reason == "the disk is full"


def test_an_accepted_job_runs_once_even_when_that_cannot_be_recorded(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark_submitted(*_: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr(SubmissionDirs, "mark_submitted", mark_submitted)
    harness.hand_over(harness.launch(1))
    assert harness.until_ended(1) == [SUCCEEDED]
    assert harness.runs(1) == 1


def test_an_invalid_environment_is_refused_before_anything_is_submitted(
    harness: EngineHarness, site: ProcessSite
) -> None:
    with pytest.raises(UserError):
        harness.engine.prepare(replace(harness.launch(1), environment={"": "x"}), None)
    harness.engine.start_prepared()
    assert submissions(site) == []
