"""The router finds the handler of a request, or answers why there is none."""

import pytest

from gpuyard.daemon.server.http_messages import HttpError, Request, RouteKey, Router

ROUTER = Router([("GET", "/jobs"), ("POST", "/jobs/cancel"), ("GET", "/jobs/{id}"), ("GET", "/jobs/{id}/log/live")])


def find(method: str, path: str) -> tuple[RouteKey, list[int]]:
    return ROUTER.find(Request(method=method, path=path))


def test_a_request_is_routed_by_its_method_and_a_path_with_numbers() -> None:
    assert find("GET", "/jobs") == (("GET", "/jobs"), [])
    assert find("GET", "/jobs/17") == (("GET", "/jobs/{id}"), [17])
    assert find("GET", "/jobs/17/log/live") == (("GET", "/jobs/{id}/log/live"), [17])
    assert find("POST", "/jobs/cancel") == (("POST", "/jobs/cancel"), [])
    assert find("HEAD", "/jobs/17") == (("GET", "/jobs/{id}"), [17])
    with pytest.raises(HttpError, match="takes POST, not DELETE") as refused:
        find("DELETE", "/jobs/cancel")
    assert (refused.value.status, refused.value.headers) == (405, (("Allow", "POST"),))


@pytest.mark.parametrize(
    "path",
    [
        "/", "/job", "/jobs/", "/jobs/0", "/jobs/-1", "/jobs/1x", "/jobs/\u0661", "/jobs/1/2",
        "/jobs/9999999999999999999",
    ],
)  # fmt: skip
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(HttpError) as refused:
        find("GET", path)
    assert refused.value.status == 404
