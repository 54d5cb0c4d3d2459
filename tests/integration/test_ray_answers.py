"""How the Ray engine handles answers that a healthy Ray does not give; a stand-in server gives them."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuyard.config import RayConfig
from gpuyard.engines.cluster import ray_site
from gpuyard.engines.cluster.ray_site import RaySite
from gpuyard.engines.cluster.site import ClusterSubmission, Sighting, SiteState, SiteUnreachable
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.lease import Need

SUBMISSION = ClusterSubmission(
    token="f00d", terms=ClusterTerms(need=Need(), name="a job"), count=3, folder="/f00d", supervisor=("true",)
)
SIGHTING = Sighting(id="gpuyard-f00d-0", at=SiteState.FAILED)
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextlib.contextmanager
def answering(answer: Answer, environment: dict[str, str] = NO_TOKEN) -> Iterator[RaySite]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self)
            with contextlib.suppress(ConnectionError):  # the client may have disconnected
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - named by the base class

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - named by the base class

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield RaySite(RayConfig(address=f"http://127.0.0.1:{server.server_port}"), environment)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_missing_token_is_reported_and_a_present_one_is_sent() -> None:
    def guard(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        is_known = request.headers["Authorization"] == "Bearer s3cret"
        return (200, b'{"logs": "come in"}') if is_known else (401, b"Unauthorized")

    with answering(guard) as site, pytest.raises(SiteUnreachable, match="requires a token") as error:
        site.report([])
    assert "RAY_AUTH_TOKEN" in (error.value.hint or "")
    with answering(guard, {"RAY_AUTH_TOKEN": "s3cret\n"}) as site:
        assert site.output(SIGHTING) == b"come in"


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    def echo(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        return 200, json.dumps({"logs": request.headers.get("Authorization", "none")}).encode()

    environment = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    with answering(echo, environment) as site:
        assert site.output(SIGHTING) == b"none"
    (tmp_path / "token").write_text("s3cret\n")
    with answering(echo, environment) as site:
        assert site.output(SIGHTING) == b"Bearer s3cret"


def test_jobs_of_others_and_of_old_submissions_are_ignored() -> None:
    ids = ("gpuyard-f00d-1", "gpuyard-0ld-1", "raysubmit_4LamXRuQpYdSMg7J", None)
    answers = {
        "/api/jobs/": [{"submission_id": each, "status": "RUNNING"} for each in ids],
        "/api/cluster_status": {"data": {"clusterStatus": None}},
        "/api/v0/nodes": {"data": {"result": {"result": [{"state": "ALIVE", "resources_total": {"GPU": 4.0}}]}}},
    }
    with answering(lambda request: (200, json.dumps(answers[request.path.partition("?")[0]]).encode())) as site:
        report = site.report([SUBMISSION])
    assert list(report.sightings) == [("f00d", 1)]
    assert report.offer.free is not None
    assert report.offer.free.gpus == 3.0


def test_only_the_time_for_which_we_have_seen_it_counts_for_a_pending_job_and_for_a_report_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clocks of Ray's machines, and ours, may be wrong or be set."""
    moment = 1000.0
    monkeypatch.setattr("gpuyard.engines.cluster.ray_site.time", SimpleNamespace(monotonic=lambda: moment))
    use = {"time": 1.0, "loadMetricsReport": {"usage": {"GPU": [3.0, 4.0]}}}
    answers = {
        "/api/jobs/": [{"submission_id": "gpuyard-f00d-1", "status": "PENDING", "start_time": 1000}],
        "/api/cluster_status": {"data": {"clusterStatus": use}},
        "/api/v0/nodes": {"data": {"result": {"result": [{"state": "ALIVE", "resources_total": {"GPU": 4.0}}]}}},
    }

    def report() -> tuple[SiteState, float | None]:
        found = site.report([SUBMISSION])
        assert found.offer.free is not None
        return found.sightings["f00d", 1].at, found.offer.free.gpus

    with answering(lambda request: (200, json.dumps(answers[request.path.partition("?")[0]]).encode())) as site:
        assert report() == (SiteState.PENDING, 0.0)
        moment += 50.0
        assert report() == (SiteState.PENDING, 0.0)
        moment += 50.0
        assert report() == (SiteState.PENDING, 3.0)  # the report is old, so only our own job counts
        use["time"] = 2.0
        assert report() == (SiteState.PENDING, 0.0)
        moment += 30 * 60.0
        assert report()[0] is SiteState.LOST


def test_a_job_unknown_to_ray_has_no_output_and_needs_no_cancel() -> None:
    with answering(lambda _: (404, b"Job gpuyard-f00d-0 does not exist")) as site:
        assert site.output(SIGHTING) is None
        site.cancel([SIGHTING.id])


def test_a_failed_cancel_or_read_raises() -> None:
    with answering(lambda _: (500, b"no agent")) as site:
        with pytest.raises(SiteUnreachable, match="no agent"):
            site.cancel([SIGHTING.id])
        with pytest.raises(SiteUnreachable, match="no agent"):
            site.output(SIGHTING)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"Not Found", "no Ray dashboard"),
        (
            500,
            b"Traceback (most recent call last):\nTimeoutError: no agent\n",
            "failed \\(500\\): TimeoutError: no agent",
        ),
        (200, b"<html>hello</html>", "cannot be understood"),
        (302, b"", "failed \\(302\\)"),
    ],
)
def test_an_unexpected_answer_counts_as_unreachable(status: int, body: bytes, message: str) -> None:
    with answering(lambda _: (status, body)) as site:
        with pytest.raises(SiteUnreachable, match=message):
            site.report([SUBMISSION])
        if status != 200:
            with pytest.raises(SiteUnreachable, match=message):
                site.submit(SUBMISSION)


def test_a_partly_accepted_submission_is_not_reported_as_rejected() -> None:
    answers = iter([(200, b"{}"), (400, b"ValueError: enough")])
    with answering(lambda _: next(answers)) as site, pytest.raises(SiteUnreachable, match=r"took 1 of 3.*enough"):
        site.submit(SUBMISSION)


def test_a_submission_or_cancel_over_its_time_limit_continues_at_the_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_site, "_ANSWER_WITHIN_S", 0.05)

    def slow(_: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        time.sleep(0.04)
        return 200, b"{}"

    with answering(slow) as site:
        with pytest.raises(SiteUnreachable, match=r"took [12] of 3"):
            site.submit(SUBMISSION)
        with pytest.raises(SiteUnreachable, match=r"stopped [12] of 3"):
            site.cancel(["gpuyard-f00d-0", "gpuyard-f00d-1", "gpuyard-f00d-2"])


def test_every_request_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_site, "_ANSWER_WITHIN_S", 0.2)
    is_over = threading.Event()

    def never(_: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        is_over.wait()
        return 200, b"[]"

    def drop_by_drop(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        with contextlib.suppress(ConnectionError):
            request.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while not is_over.wait(0.05):
                request.wfile.write(b" ")
        return 200, b""

    for answer in (never, drop_by_drop):
        is_over.clear()
        with answering(answer) as site:
            try:
                with pytest.raises(SiteUnreachable, match="no answer from a Ray dashboard"):
                    site.report([])
            finally:
                is_over.set()
