"""The router finds the handler of a request, or answers why there is none."""

import pytest

from gpuyard.daemon.server.http_parser import HttpError, Request, Response
from gpuyard.daemon.server.router import Router

ROUTER = Router(
    {
        ("GET", "/jobs"): lambda _: Response(body=b"jobs"),
        ("POST", "/jobs/cancel"): lambda _: Response(body=b"cancel"),
        ("GET", "/jobs/{id}"): lambda _, job_id: Response(body=b"job %d" % job_id),
        ("GET", "/jobs/{id}/log/live"): lambda _, job_id: Response(body=b"live %d" % job_id),
    }
)


def ask(method: str, path: str) -> bytes:
    answer = ROUTER.find(Request(method=method, path=path))()
    assert isinstance(answer, Response)
    return answer.body


def test_a_path_may_contain_a_number() -> None:
    assert ask("GET", "/jobs") == b"jobs"
    assert ask("GET", "/jobs/17") == b"job 17"
    assert ask("GET", "/jobs/17/log/live") == b"live 17"
    assert ask("POST", "/jobs/cancel") == b"cancel"


def test_a_head_request_is_answered_like_a_get_request() -> None:
    assert ask("HEAD", "/jobs/17") == b"job 17"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/job",
        "/jobs/",
        "/jobs/0",
        "/jobs/-1",
        "/jobs/1x",
        "/jobs/\u0661",
        "/jobs/1/2",
        "/jobs/9999999999999999999",
    ],
)
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(HttpError) as refused:
        ask("GET", path)
    assert refused.value.status == 404


def test_a_wrong_method_is_answered_with_the_allowed_methods() -> None:
    with pytest.raises(HttpError, match="takes POST, not DELETE") as refused:
        ask("DELETE", "/jobs/cancel")
    assert (refused.value.status, refused.value.headers) == (405, (("Allow", "POST"),))
