"""The router finds the handler of a request, or answers why there is none."""

import pytest

from gpuyard.daemon.server.http_messages import HttpError, Request, RouteKey, Router

ROUTER = Router([("GET", "/jobs"), ("POST", "/jobs/cancel"), ("GET", "/jobs/{id}"), ("GET", "/jobs/{id}/log/live")])


def find(method: str, path: str) -> tuple[RouteKey, list[int]]:
    return ROUTER.find(Request(method=method, path=path))


def test_a_path_may_contain_a_number() -> None:
    assert find("GET", "/jobs") == (("GET", "/jobs"), [])
    assert find("GET", "/jobs/17") == (("GET", "/jobs/{id}"), [17])
    assert find("GET", "/jobs/17/log/live") == (("GET", "/jobs/{id}/log/live"), [17])
    assert find("POST", "/jobs/cancel") == (("POST", "/jobs/cancel"), [])


def test_a_head_request_is_answered_like_a_get_request() -> None:
    assert find("HEAD", "/jobs/17") == (("GET", "/jobs/{id}"), [17])


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
        find("GET", path)
    assert refused.value.status == 404


def test_a_wrong_method_is_answered_with_the_allowed_methods() -> None:
    with pytest.raises(HttpError, match="takes POST, not DELETE") as refused:
        find("DELETE", "/jobs/cancel")
    assert (refused.value.status, refused.value.headers) == (405, (("Allow", "POST"),))
