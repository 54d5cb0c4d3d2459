"""Who may ask what over the page's listener, and how often; whose a connection is."""

import ipaddress
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.daemon.web.access_rules import (
    LOOPBACK,
    AccessRules,
    Credential,
    check_rights,
    check_source,
    cookie_name,
    cookie_value,
    credential_of,
)
from gpuyard.daemon.web.peer_user import is_here, listed_names, plain, why_not
from gpuyard.daemon.web.token_bucket import Bucket
from gpuyard.daemon.web.token_file import make_token, read_token
from gpuyard.errors import EnvironmentFault

HOST = "127.0.0.1:8765"
TERMS = AccessRules(token="the-token-of-this-page")
READ_ONLY = AccessRules(token=TERMS.token, is_read_only=True)
COOKIE = f"gpuyard-8765={cookie_value(TERMS.token)}"
JSON: dict[str, Any] = {"content-type": "application/json"}
FROM_PAGE: dict[str, Any] = {"origin": f"http://{HOST}"}
VISIT: dict[str, Any] = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def asked(method: str = "GET", path: str = "/v1/status", query: dict[str, str] | None = None, **told: Any) -> Request:
    headers = {name.replace("_", "-"): value for name, value in {"host": HOST, **told}.items()}
    return Request(method=method, path=path, query=query or {}, headers=headers)


def status(request: Request, terms: AccessRules = TERMS) -> int:
    """As the listener goes by the gate; 200 is let in."""
    try:
        check_source(request, terms)
        check_rights(request, credential_of(request, terms), terms)
    except HttpError as refused:
        return refused.status
    return 200


def source(request: Request, terms: AccessRules = TERMS) -> int:
    try:
        check_source(request, terms)
    except HttpError as refused:
        return refused.status
    return 200


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get"])
def test_a_method_that_the_page_does_not_need_is_refused(method: str) -> None:
    assert source(asked(method)) == 405


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8765", True),
        ("127.0.0.1", True),
        ("localhost:9000", True),
        ("LOCALHOST:9000", True),
        ("[::1]:8765", True),
        ("[::1]", True),
        ("", False),
        ("evil.example:8765", False),
        ("evil.localhost:8765", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1, evil.example", False),
        ("127.0.0.1:8765@evil.example", False),
        ("evil.example/127.0.0.1", False),
        ("127.0.0.1:", False),
        ("127.0.0.1:80:80", False),
        ("localhost.", False),
        ("0.0.0.0:8765", False),
        ("127.0.0.2:8765", False),
        ("2130706433:8765", False),
        ("::1", False),
        ("[::1", False),
        ("192.168.0.7:8765", False),
        ("box:8765", False),
    ],
)
def test_it_is_asked_for_by_a_name_of_its_own(host: str, is_ours: bool) -> None:
    assert (source(asked(host=host)) == 200) is is_ours


def test_it_answers_to_no_request_without_a_host() -> None:
    assert source(Request(method="GET", path="/")) == 403


def test_where_it_is_bound_to_an_address_that_is_a_name_of_its_own() -> None:
    terms = AccessRules(token="t", names=LOOPBACK | {"192.168.0.7", "box.lab"})
    assert source(asked(host="192.168.0.7:8765"), terms) == 200
    assert source(asked(host="Box.Lab:8765"), terms) == 200
    assert source(asked(host="localhost:1"), terms) == 200
    assert source(asked(host="192.168.0.8:8765"), terms) == 403
    assert source(asked(host="evil.example"), terms) == 403


def test_where_it_is_bound_to_all_addresses_any_of_them_will_do_but_no_strange_name() -> None:
    terms = AccessRules(token="t", names=LOOPBACK | {"box"}, takes_addresses=True)
    assert [source(asked(host=host), terms) for host in ("10.0.0.4:1", "[fe80::1]:1", "box:1")] == [200, 200, 200]
    assert [source(asked(host=host), terms) for host in ("evil.example", "10.0.0.4.nip.io", "1234")] == [403] * 3


@pytest.mark.parametrize(
    ("origin", "is_ours"),
    [
        (f"http://{HOST}", True),
        ("https://127.0.0.1:8765", False),
        ("http://127.0.0.1:8766", False),
        ("http://127.0.0.1", False),
        ("http://localhost:8765", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        (f"http://{HOST}, http://evil.example", False),
        (f"http://{HOST}/", False),
    ],
)
def test_an_origin_is_the_pages_own(origin: str, is_ours: bool) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert (source(asked(method, origin=origin)) == 200) is is_ours


@pytest.mark.parametrize(
    ("method", "site", "expected"),
    [
        ("GET", "same-origin", 200),
        ("POST", "same-origin", 200),
        ("GET", "none", 200),
        ("HEAD", "none", 200),
        ("POST", "none", 403),
        ("GET", "same-site", 403),
        ("POST", "same-site", 403),
        ("GET", "cross-site", 403),
        ("POST", "cross-site", 403),
        ("GET", "", 403),
        ("GET", "something new", 403),
    ],
)
def test_what_a_browser_sends_for_other_sites_is_refused(method: str, site: str, expected: int) -> None:
    assert source(asked(method, sec_fetch_site=site)) == expected
    assert source(asked(method, sec_fetch_site=site, **FROM_PAGE)) == expected


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_elsewhere_leads_to_the_page_and_to_nothing_else(site: str) -> None:
    def visit(method: str = "GET", path: str = "/", **told: str) -> int:
        headers: dict[str, Any] = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document", **told}
        return source(asked(method, path, sec_fetch_site=site, **headers))

    assert visit() == 200
    assert visit("POST") == 403
    assert visit(path="/v1/status") == 403
    assert visit(path="/static/page.js") == 403
    assert visit(sec_fetch_dest="iframe") == 403
    assert visit(sec_fetch_mode="no-cors") == 403
    assert visit(origin="http://evil.example") == 403


def test_on_a_visit_from_elsewhere_no_cookie_counts() -> None:
    request = asked(path="/", sec_fetch_site="same-site", cookie=COOKIE, **VISIT)
    assert credential_of(request, TERMS) is Credential.NONE
    assert credential_of(asked(path="/", sec_fetch_site="none", cookie=COOKIE, **VISIT), TERMS) is Credential.COOKIE


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, Credential.NONE),
        ({"cookie": COOKIE}, Credential.COOKIE),
        ({"cookie": f"a=b; {COOKIE};c"}, Credential.COOKIE),
        ({"cookie": f"gpuyard-8765=planted; {COOKIE}"}, Credential.COOKIE),
        ({"cookie": COOKIE.replace("8765", "8766")}, Credential.NONE),
        ({"cookie": COOKIE[:-1]}, Credential.NONE),
        ({"cookie": f"gpuyard-8765={TERMS.token}"}, Credential.NONE),
        ({"cookie": "gpuyard-8765=ä"}, Credential.NONE),
        ({"authorization": f"Bearer {TERMS.token}"}, Credential.TOKEN),
        ({"authorization": f"bearer  {TERMS.token} "}, Credential.TOKEN),
        ({"authorization": "Bearer wrong"}, Credential.WRONG_TOKEN),
        ({"authorization": "Bearer "}, Credential.WRONG_TOKEN),
        ({"authorization": "Bearer \udc80ä"}, Credential.WRONG_TOKEN),
        ({"authorization": f"Bearer {cookie_value(TERMS.token)}"}, Credential.WRONG_TOKEN),
        ({"authorization": "Basic abc"}, Credential.NONE),
        ({"authorization": "Bearer wrong", "cookie": COOKIE}, Credential.WRONG_TOKEN),
    ],
)
def test_a_script_shows_the_token_and_a_browser_its_cookie(told: dict[str, Any], expected: Credential) -> None:
    assert credential_of(asked(**told), TERMS) is expected


def test_a_token_in_the_address_counts_for_the_page_alone() -> None:
    token = {"token": TERMS.token}
    assert credential_of(asked(path="/", query=token), TERMS) is Credential.TOKEN
    assert credential_of(asked(path="/", query={"token": "x"}), TERMS) is Credential.WRONG_TOKEN
    assert credential_of(asked(path="/v1/status", query=token), TERMS) is Credential.NONE


def test_a_cookie_is_named_by_the_port_that_the_browser_sees_and_does_not_tell_the_token() -> None:
    assert cookie_name(asked(host="localhost:9001")) == "gpuyard-9001"
    assert cookie_name(asked(host="[::1]:9001")) == "gpuyard-9001"
    assert cookie_name(asked(host="localhost")) == "gpuyard-80"
    assert cookie_value("a") != cookie_value("b")
    assert TERMS.token not in cookie_value(TERMS.token)


@pytest.mark.parametrize("credential", [Credential.NONE, Credential.WRONG_TOKEN])
def test_nothing_is_done_for_whoever_has_no_key(credential: Credential) -> None:
    for request in (asked(), asked("POST", "/v1/jobs/cancel", **JSON), asked(path="/static/page.js")):
        with pytest.raises(HttpError) as refused:
            check_rights(request, credential, TERMS)
        assert refused.value.status == 401


@pytest.mark.parametrize("path", ["/v1/stop", "/v1/web", "/v1/web/stop", "/v1/websites"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_a_page_never_needs_is_refused_to_it(method: str, path: str) -> None:
    key: dict[str, Any] = {"cookie": COOKIE, **FROM_PAGE, **JSON}
    assert status(asked(method, path, **key)) == 403
    assert status(asked(method, "/v1/tags/stop", **key)) == 200


@pytest.mark.parametrize("target", ["/web", "/%77eb", "/web?x=1", "/status /web", "/stop"])
def test_what_may_not_be_asked_may_not_be_watched(target: str) -> None:
    assert status(asked(path="/v1/events", query={"watch": target}, cookie=COOKIE)) == 403
    assert status(asked(path="/v1/events", query={"watch": "/status /jobs?state=web"}, cookie=COOKIE)) == 200


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"cookie": COOKIE, **JSON, **FROM_PAGE}, 200),
        ({"cookie": COOKIE, **JSON, "sec-fetch-site": "same-origin"}, 200),
        ({"cookie": COOKIE, "content-type": "Application/JSON; charset=utf-8", **FROM_PAGE}, 200),
        ({"cookie": COOKIE, **JSON}, 403),
        ({"cookie": COOKIE, **FROM_PAGE}, 415),
        ({"cookie": COOKIE, "content-type": "text/plain", **FROM_PAGE}, 415),
        ({"cookie": COOKIE, "content-type": "application/x-www-form-urlencoded", **FROM_PAGE}, 415),
        ({"cookie": COOKIE, "content-type": "multipart/form-data; boundary=x", **FROM_PAGE}, 415),
        ({"cookie": COOKIE, "content-type": "text/plain; application/json", **FROM_PAGE}, 415),
        ({"cookie": COOKIE, "content-type": "application/jsonx", **FROM_PAGE}, 415),
        ({"authorization": f"Bearer {TERMS.token}", **JSON}, 200),
        ({"authorization": f"Bearer {TERMS.token}"}, 415),
    ],
)
def test_a_change_is_json_and_with_a_cookie_says_where_it_comes_from(told: dict[str, Any], expected: int) -> None:
    assert status(asked("POST", "/v1/jobs/cancel", **told)) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (asked(path="/v1/jobs/1", cookie=COOKIE), 200),
        (asked(path="/v1/jobs/1", query={"environment": "1"}, cookie=COOKIE), 403),
        (asked(path="/v1/events", query={"watch": "/jobs/1?environment=1"}, cookie=COOKIE), 403),
        (asked(path="/v1/events", query={"watch": "/status /jobs/1?a=b&%65nvironment=1"}, cookie=COOKIE), 403),
        (asked(path="/v1/events", query={"watch": "/jobs/1"}, cookie=COOKIE), 200),
        (asked("POST", "/v1/jobs/cancel", cookie=COOKIE, **JSON, **FROM_PAGE), 403),
        (asked("POST", "/v1/submissions", authorization=f"Bearer {TERMS.token}", **JSON), 403),
        (asked("HEAD", "/v1/status", cookie=COOKIE), 200),
    ],
)
def test_a_page_for_looking_changes_nothing_and_shows_no_values_of_variables(request_: Request, expected: int) -> None:
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
def test_without_the_key_nobody_gets_in_whatever_they_send(parts: dict[str, Any], bearer: str, cookie: str) -> None:
    told = {"host": HOST, **parts["headers"], "authorization": f"Bearer {bearer}", "cookie": f"gpuyard-8765={cookie}"}
    for kept in ({"authorization"}, {"cookie"}, {"authorization", "cookie"}, set[str]()):
        headers = {name: value for name, value in told.items() if name not in kept}
        assert status(Request(**{**parts, "headers": headers})) >= 400


@given(requests, st.sampled_from(["same-site", "cross-site"]))
def test_another_site_changes_and_reads_nothing_with_the_users_cookie(parts: dict[str, Any], site: str) -> None:
    headers = {**parts["headers"], "host": HOST, "cookie": COOKIE, "sec-fetch-site": site}
    request = Request(**{**parts, "headers": headers})
    assert status(request) >= 400 or credential_of(request, TERMS) is Credential.TOKEN


@given(requests)
def test_with_a_cookie_nothing_is_changed_that_does_not_come_from_the_page(parts: dict[str, Any]) -> None:
    headers = {**parts["headers"], "host": HOST, "cookie": COOKIE}
    request = Request(**{**parts, "method": "POST", "headers": headers})
    if status(request) == 200:
        assert headers.get("origin") == f"http://{HOST}" or headers.get("sec-fetch-site") == "same-origin"
        assert headers["content-type"].lower().startswith("application/json")


# The token


def test_a_token_is_kept_for_its_user_alone_and_made_anew_where_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "web.token"
    token = read_token(path)
    assert (len(token) >= 43, read_token(path), stat.S_IMODE(path.stat().st_mode)) == (True, token, 0o600)
    assert make_token(path) != token
    path.write_text("short")
    assert len(read_token(path)) >= 43
    before = path.read_text()
    path.chmod(0o640)
    assert (read_token(path) != before, stat.S_IMODE(path.stat().st_mode)) == (True, 0o600)


def test_a_token_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        read_token(tmp_path / "no folder" / "web.token")
    (tmp_path / "web.token").write_bytes(b"\xff")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        read_token(tmp_path / "web.token")


# How often


@given(st.integers(1, 50), st.floats(0.1, 100), st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=200))
def test_no_more_happens_than_the_pace_allows_and_whoever_waits_as_told_may(
    most: int, per_s: float, gaps: list[float]
) -> None:
    bucket, now, taken = Bucket(most, per_s), 0.0, 0
    for gap in gaps:
        now += gap
        wait_s = bucket.take(now)
        taken += wait_s == 0
        if wait_s:
            now += wait_s + 1e-6
            assert bucket.take(now) == 0
            taken += 1
    assert taken <= most + now * per_s + 1e-6 * len(gaps)


# Whose a connection is

LISTENING = (
    "   0: 0100007F:223D 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 17 1 0 100 0 0 10 0"
)
PEER, OWN = (plain("127.0.0.1"), 0xC001), (plain("127.0.0.1"), 8765)


def row(uid: int = 1000, inode: int = 99, state: str = "01", local: str = "0100007F:C001") -> str:
    return f"   1: {local} 0100007F:223D {state} 00000000:00000000 00:00000000 00000000  {uid}        0 {inode} 1 0 20"


@pytest.mark.parametrize(
    ("lines", "is_let_in"),
    [
        ([LISTENING, row()], True),
        ([LISTENING, row(uid=0)], True),
        ([LISTENING, row(uid=1001)], False),
        ([row(uid=1001), LISTENING], False),
        ([LISTENING, row(uid=0, inode=0, state="06")], False),  # closed: the kernel no longer says whose it was
        ([LISTENING], False),
        ([LISTENING, row(local="0100007F:C002")], False),
        ([LISTENING, row(uid=1001, local="0100007F:C002"), row()], True),
        ([], True),  # nothing is told at all
    ],
)
def test_on_the_machine_itself_only_its_user_and_root_get_in(lines: list[str], is_let_in: bool) -> None:
    assert (why_not(lines, PEER, OWN, 1000) is None) is is_let_in


def test_a_socket_for_both_kinds_of_addresses_is_found_by_either_form() -> None:
    mapped = "0000000000000000FFFF00000100007F"
    line = f"   1: {mapped}:C001 {mapped}:223D 01 00000000:00000000 00:00000000 00000000  1001        0 99 1 0 20"
    assert why_not([LISTENING, line], PEER, OWN, 1000) == "this page is another user's"
    assert plain("::ffff:127.0.0.1") == ipaddress.ip_address("127.0.0.1")
    assert listed_names(plain("::1"), 8765) == {"00000000000000000000000001000000:223D"}


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("10.0.0.4", "10.0.0.4", True),
        ("10.0.0.5", "127.0.0.1", True),
        ("10.0.0.5", "10.0.0.4", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_a_connection_from_this_machine_is_told_from_one_from_elsewhere(peer: str, own: str, expected: bool) -> None:
    assert is_here(plain(peer), plain(own)) is expected
