"""Which requests the web page accepts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.daemon.server.http_messages import HttpError, Request
from gpuyard.daemon.web.page_server import LOOPBACK, AccessRules, check_rights, check_source, has_token

HOST = "127.0.0.1:8765"
RULES = AccessRules(token="the-token-of-this-page")
READ_ONLY = AccessRules(token=RULES.token, is_read_only=True)
BEARER: dict[str, Any] = {"authorization": f"Bearer {RULES.token}"}
JSON: dict[str, Any] = {"content-type": "application/json"}
FROM_PAGE: dict[str, Any] = {"origin": f"http://{HOST}"}
VISIT: dict[str, Any] = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def make(method: str = "GET", path: str = "/v1/status", query: dict[str, str] | None = None, **headers: Any) -> Request:
    named = {name.replace("_", "-"): value for name, value in {"host": HOST, **headers}.items()}
    return Request(method=method, path=path, query=query or {}, headers=named)


def status(request: Request, rules: AccessRules = RULES) -> int:
    """Return the status of the refusal, or 200 if the request is accepted."""
    try:
        check_source(request, rules)
        check_rights(request, rules, has_access=has_token(request, rules))
    except HttpError as refusal:
        return refusal.status
    return 200


def source_status(request: Request, rules: AccessRules = RULES) -> int:
    try:
        check_source(request, rules)
    except HttpError as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get"])
def test_an_unsupported_method_is_refused(method: str) -> None:
    assert source_status(make(method)) == 405


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8765", True), ("127.0.0.1", True), ("localhost:9000", True), ("LOCALHOST:9000", True),
        ("[::1]:8765", True), ("[::1]", True), ("", False), ("evil.example:8765", False),
        ("evil.localhost:8765", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False),
        ("127.0.0.1, evil.example", False), ("127.0.0.1:8765@evil.example", False),
        ("evil.example/127.0.0.1", False), ("127.0.0.1:", False), ("127.0.0.1:80:80", False),
        ("localhost.", False), ("0.0.0.0:8765", False), ("127.0.0.2:8765", False), ("2130706433:8765", False),
        ("::1", False), ("[::1", False), ("192.168.0.7:8765", False), ("box:8765", False),
    ],
)  # fmt: skip
def test_the_host_has_to_be_a_name_of_the_page(host: str, is_ours: bool) -> None:
    assert (source_status(make(host=host)) == 200) is is_ours


def test_the_address_the_page_is_bound_to_is_one_of_its_names() -> None:
    rules = AccessRules(token="t", names=LOOPBACK | {"192.168.0.7", "box.lab"})
    assert source_status(make(host="192.168.0.7:8765"), rules) == 200
    assert source_status(make(host="Box.Lab:8765"), rules) == 200
    assert source_status(make(host="localhost:1"), rules) == 200
    assert source_status(make(host="192.168.0.8:8765"), rules) == 403
    assert source_status(make(host="evil.example"), rules) == 403
    rules = AccessRules(token="t", names=LOOPBACK | {"box"}, accepts_addresses=True)
    assert [source_status(make(host=host), rules) for host in ("10.0.0.4:1", "[fe80::1]:1", "box:1")] == [200, 200, 200]
    assert [source_status(make(host=host), rules) for host in ("evil.example", "10.0.0.4.nip.io", "1234")] == [403] * 3
    assert source_status(Request(method="GET", path="/")) == 403


@pytest.mark.parametrize(
    ("origin", "is_ours"),
    [
        (f"http://{HOST}", True), ("https://127.0.0.1:8765", False), ("http://127.0.0.1:8766", False),
        ("http://127.0.0.1", False), ("http://localhost:8765", False), ("http://evil.example", False),
        ("null", False), ("", False), (f"http://{HOST}, http://evil.example", False), (f"http://{HOST}/", False),
    ],
)  # fmt: skip
def test_the_origin_has_to_be_the_page(origin: str, is_ours: bool) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert (source_status(make(method, origin=origin)) == 200) is is_ours


@pytest.mark.parametrize(
    ("method", "site", "expected"),
    [
        ("GET", "same-origin", 200), ("POST", "same-origin", 200), ("GET", "none", 200), ("HEAD", "none", 200),
        ("POST", "none", 403), ("GET", "same-site", 403), ("POST", "same-site", 403), ("GET", "cross-site", 403),
        ("POST", "cross-site", 403), ("GET", "", 403), ("GET", "something new", 403),
    ],
)  # fmt: skip
def test_a_request_on_behalf_of_another_site_is_refused(method: str, site: str, expected: int) -> None:
    assert source_status(make(method, sec_fetch_site=site)) == expected
    assert source_status(make(method, sec_fetch_site=site, **FROM_PAGE)) == expected


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_on_another_site_leads_to_the_page_and_to_nothing_else(site: str) -> None:
    def visit(method: str = "GET", path: str = "/", **headers: str) -> int:
        all_headers: dict[str, Any] = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document", **headers}
        return source_status(make(method, path, sec_fetch_site=site, **all_headers))

    assert visit() == 200
    assert visit("POST") == 403
    assert visit(path="/v1/status") == 403
    assert visit(path="/static/page.js") == 403
    assert visit(sec_fetch_dest="iframe") == 403
    assert visit(sec_fetch_mode="no-cors") == 403
    assert visit(origin="http://evil.example") == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None), ({"cookie": f"gpuyard-8765={RULES.token}"}, None), ({"cookie": RULES.token}, None),
        ({"authorization": f"Bearer {RULES.token}"}, True), ({"authorization": f"bearer  {RULES.token} "}, True),
        ({"authorization": "Bearer wrong"}, False), ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer \udc80ä"}, False), ({"authorization": "Basic abc"}, None),
    ],
)  # fmt: skip
def test_the_token_is_sent_as_a_header_and_no_cookie_counts(headers: dict[str, Any], expected: bool | None) -> None:
    assert has_token(make(**headers), RULES) is expected


def test_a_token_in_the_query_counts_only_for_the_page() -> None:
    token = {"token": RULES.token}
    assert has_token(make(path="/", query=token), RULES) is True
    assert has_token(make(path="/", query={"token": "x"}), RULES) is False
    assert has_token(make(path="/v1/status", query=token), RULES) is None


@pytest.mark.parametrize("has_access", [None, False])
def test_a_request_without_a_valid_credential_is_refused(has_access: bool | None) -> None:
    for request in (make(), make("POST", "/v1/jobs/cancel", **JSON), make(path="/static/page.js")):
        with pytest.raises(HttpError) as refusal:
            check_rights(request, RULES, has_access=has_access)
        assert refusal.value.status == 401


@pytest.mark.parametrize("path", ["/v1/stop", "/v1/web", "/v1/web/stop", "/v1/websites"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_routes_that_the_page_never_needs_are_refused(method: str, path: str) -> None:
    headers: dict[str, Any] = {**BEARER, **FROM_PAGE, **JSON}
    assert status(make(method, path, **headers)) == 403
    assert status(make(method, "/v1/tags/stop", **headers)) == 200


@pytest.mark.parametrize("target", ["/web", "/%77eb", "/web?x=1", "/status /web", "/stop"])
def test_a_refused_target_cannot_be_watched(target: str) -> None:
    assert status(make(path="/v1/events", query={"watch": target}, **BEARER)) == 403
    assert status(make(path="/v1/events", query={"watch": "/status /jobs?state=web"}, **BEARER)) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**BEARER, **JSON, **FROM_PAGE}, 200), ({**BEARER, **JSON, "sec-fetch-site": "same-origin"}, 200),
        ({**BEARER, "content-type": "Application/JSON; charset=utf-8", **FROM_PAGE}, 200),
        ({**BEARER, **FROM_PAGE}, 415), ({**BEARER, "content-type": "text/plain", **FROM_PAGE}, 415),
        ({**BEARER, "content-type": "application/x-www-form-urlencoded", **FROM_PAGE}, 415),
        ({**BEARER, "content-type": "multipart/form-data; boundary=x", **FROM_PAGE}, 415),
        ({**BEARER, "content-type": "text/plain; application/json", **FROM_PAGE}, 415),
        ({**BEARER, "content-type": "application/jsonx", **FROM_PAGE}, 415), ({**BEARER, **JSON}, 200),
        (BEARER, 415), ({**JSON, **FROM_PAGE}, 401),
    ],
)  # fmt: skip
def test_a_change_has_to_be_json_and_have_the_token(headers: dict[str, Any], expected: int) -> None:
    assert status(make("POST", "/v1/jobs/cancel", **headers)) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (make(path="/v1/jobs/1", **BEARER), 200),
        (make(path="/v1/jobs/1", query={"environment": "1"}, **BEARER), 403),
        (make(path="/v1/events", query={"watch": "/jobs/1?environment=1"}, **BEARER), 403),
        (make(path="/v1/events", query={"watch": "/status /jobs/1?a=b&%65nvironment=1"}, **BEARER), 403),
        (make(path="/v1/events", query={"watch": "/jobs/1"}, **BEARER), 200),
        (make("POST", "/v1/jobs/cancel", **BEARER, **JSON, **FROM_PAGE), 403),
        (make("POST", "/v1/submissions", **BEARER, **JSON), 403),
        (make("HEAD", "/v1/status", **BEARER), 200),
    ],
)
def test_a_read_only_page_changes_nothing_and_shows_no_environment(request_: Request, expected: int) -> None:
    assert status(request_, READ_ONLY) == expected


headers = st.dictionaries(
    st.sampled_from(["origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "content-type", "x"]),
    st.one_of(
        st.text(max_size=20),
        st.sampled_from([f"http://{HOST}", "null", "same-origin", "same-site", "navigate", "document", *JSON.values()]),
    ),
)
requests: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["GET", "HEAD", "POST", "PUT", "OPTIONS"]),
        "path": st.sampled_from(["/", "/v1/status", "/v1/jobs/cancel", "/v1/events", "/v1/web", "/static/page.js"]),
        "query": st.dictionaries(st.sampled_from(["watch", "environment", "token"]), st.text(max_size=20)),
        "headers": headers,
    }
)


@given(requests, st.text(max_size=60), st.text(max_size=60))
def test_no_request_without_the_token_is_accepted(parts: dict[str, Any], bearer: str, cookie: str) -> None:
    sent = {"host": HOST, **parts["headers"], "authorization": f"Bearer {bearer}", "cookie": f"gpuyard-8765={cookie}"}
    for left_out in ({"authorization"}, {"cookie"}, {"authorization", "cookie"}, set[str]()):
        headers = {name: value for name, value in sent.items() if name not in left_out}
        assert status(Request(**{**parts, "headers": headers})) >= 400


@given(requests, st.sampled_from(["same-site", "cross-site"]))
def test_another_site_can_neither_change_nor_read_even_with_the_token(parts: dict[str, Any], site: str) -> None:
    request = Request(**{**parts, "headers": {**parts["headers"], "host": HOST, **BEARER, "sec-fetch-site": site}})
    assert status(request) >= 400 or (request.path == "/" and request.method != "POST")
