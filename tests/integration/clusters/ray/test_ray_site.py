"""Ray as a site: a real Ray, started for these tests."""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpuyard.config import RayConfig
from gpuyard.engines.cluster.ray_site import RaySite
from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, SiteRefused, SiteReport, SiteState
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import FixedMemory, Need
from tests.ray_cluster import CPUS, GPUS, RayCluster

WITHIN_S = 90.0
CARD_MB = 24_000.0
HALF = Need(memory=FixedMemory(CARD_MB / 2))
# Writes its pid and waits for the file `go`; its last two arguments are its folder and its number.
WAIT = 'echo "$$" > "$0/$1.pid"; until test -e "$0/go"; do sleep 0.05; done; '
# The configured address takes precedence over RAY_ADDRESS.
ELSEWHERE = {"RAY_ADDRESS": "http://127.0.0.1:1", "RAY_AUTH_MODE": "disabled"}

Condition = Callable[[SiteReport], bool]


@pytest.fixture
def cluster(ray_cluster: RayCluster) -> RayCluster:
    return ray_cluster


@pytest.fixture
def site(cluster: RayCluster) -> RaySite:
    return RaySite(RayConfig(address=cluster.address, gpu_memory="24000M"), ELSEWHERE)


def submission_of(folder: Path, script: str, count: int = 1, **terms: object) -> ClusterSubmission:
    token = secrets.token_hex(6)
    own = folder / token
    own.mkdir()
    all_terms: dict[str, object] = {"need": Need(), "name": "a job", **terms}
    return ClusterSubmission(
        token=token,
        terms=ClusterTerms(**all_terms),  # type: ignore[arg-type]
        count=count,
        folder=str(own),
        supervisor=("/bin/sh", "-c", script, str(own)),
    )


def wait_until(site: RaySite, submission: ClusterSubmission, is_so: Condition) -> SiteReport:
    until = time.monotonic() + WITHIN_S
    while not is_so(report := site.report([submission])):
        assert time.monotonic() < until, report
        time.sleep(0.1)
    return report


def all_are(*states: SiteState) -> Condition:
    return lambda report: {each.at for each in report.sightings.values()} == set(states)


def are_free(gpus: float, cpus: float) -> Condition:
    return lambda report: (
        report.offer.free is not None and (report.offer.free.gpus, report.offer.free.cpus) == (gpus, cpus)
    )


def by_number(report: SiteReport) -> Mapping[int, Sighting]:
    return {number: each for (_, number), each in report.sightings.items()}


def wait_for(path: Path) -> str:
    until = time.monotonic() + WITHIN_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, path
        time.sleep(0.02)
    return path.read_text()


def test_elements_share_gpus_and_each_has_its_own_outcome(site: RaySite, tmp_path: Path) -> None:
    script = WAIT + 'echo "on GPU $CUDA_VISIBLE_DEVICES"; exit "$1"'
    submission = submission_of(tmp_path, script, 3, need=HALF, cpus=1, ram_mb=64.0)
    site.submit(submission)
    running = wait_until(site, submission, all_are(SiteState.RUNNING))
    assert {each.place for each in running.sightings.values()} == {"127.0.0.1"}
    wait_until(site, submission, are_free(GPUS - 1.5, CPUS - 3))
    Path(submission.folder, "go").touch()
    over = by_number(wait_until(site, submission, all_are(SiteState.SUCCEEDED, SiteState.FAILED)))
    assert [(over[number].at, over[number].status) for number in range(3)] == [
        (SiteState.SUCCEEDED, 0),
        (SiteState.FAILED, 1),
        (SiteState.FAILED, 2),
    ]
    assert all(abs((each.ended_at or 0.0) - time.time()) < WITHIN_S for each in over.values())
    assert b"\non GPU " in (site.output(over[1]) or b"")


def test_a_repeated_submission_runs_once(site: RaySite, tmp_path: Path) -> None:
    submission = submission_of(tmp_path, 'echo ran >> "$0/ran"', 2, need=Need(devices=0), cpus=1)
    site.submit(submission)
    site.submit(submission)
    wait_until(site, submission, all_are(SiteState.SUCCEEDED))
    assert Path(submission.folder, "ran").read_text() == "ran\n" * 2


def test_a_cancelled_running_job_may_take_its_time_and_a_pending_one_ends_at_once(
    site: RaySite, tmp_path: Path
) -> None:
    # Longer than Ray's own grace period.
    script = "trap 'sleep 4; echo ended > \"$0/last\"; exit' TERM; " + WAIT
    running = submission_of(tmp_path, script, need=Need(devices=GPUS))
    waiting = submission_of(tmp_path, "exit")
    site.submit(running)
    [first] = wait_until(site, running, all_are(SiteState.RUNNING)).sightings.values()
    site.submit(waiting)
    full = wait_until(site, waiting, all_are(SiteState.PENDING))
    [second] = full.sightings.values()
    assert "waiting for resources" in second.reason
    site.cancel([second.id])
    assert all_are(SiteState.CANCELLED)(site.report([waiting]))
    wait_for(Path(running.folder, "0.pid"))
    site.cancel([first.id, "gpuyard-unknown-0"])
    wait_until(site, running, all_are(SiteState.CANCELLED))
    assert Path(running.folder, "last").read_text() == "ended\n"
    site.cancel([first.id])


def test_a_rejection_has_rays_own_message(site: RaySite, tmp_path: Path) -> None:
    options = ('--entrypoint-label-selector={"no!": "key"}',)
    with pytest.raises(SiteRefused, match="Invalid label key name `no!`"):
        site.submit(submission_of(tmp_path, "exit", options=options))


def test_resources_used_by_others_are_not_free(site: RaySite, tmp_path: Path) -> None:
    others = submission_of(tmp_path, WAIT, need=Need(devices=GPUS), cpus=1)
    mine = submission_of(tmp_path, "exit")
    wait_until(site, mine, are_free(GPUS, CPUS))
    site.submit(others)
    wait_until(site, mine, are_free(0, CPUS - 1))
    Path(others.folder, "go").touch()
    wait_until(site, mine, are_free(GPUS, CPUS))
