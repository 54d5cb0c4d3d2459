"""The access rules of the web page. Pure: each function takes the head of a request and raises HttpError to refuse it.

Rules:
- The Host header has to be one of the page's own names, which defeats DNS rebinding.
- Browsers report where a request comes from (`Origin`, `Sec-Fetch-Site`). From another site only a navigation to the
  page itself is answered.
- A change has to be JSON, which no HTML form can send.
- Scripts and the page send the token as a header. There is no cookie: browsers send those to all ports of a host.
- The page and its files, which hold nothing of the user, need no token.
- A target can be watched if a request for it would be allowed.
"""

import enum
import hmac
import ipaddress
import re

from msgspec import Struct

from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.daemon.server.router import EVENTS, target_request, watched_targets
from gpuyard.version import API

PAGE = "/"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
METHODS = ("GET", "HEAD", "POST")
_NOT_FOR_PAGES = (f"{API}/stop", f"{API}/web")
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_JSON = re.compile(r"application/json(;.*)?", re.IGNORECASE)
_OPEN_HINT = "run `gpuyard web` on the machine and open the address it prints"


class AccessRules(Struct, frozen=True, kw_only=True):
    """The settings of one listener.

    `names` are the accepted host names. `accepts_addresses`: the listener is bound to all addresses of the machine, so
    any literal IP address is accepted, too; literal IP addresses cannot be DNS-rebound.
    """

    token: str
    names: frozenset[str] = LOOPBACK
    accepts_addresses: bool = False
    is_read_only: bool = False


class Credential(enum.Enum):
    NONE = "none"
    WRONG_TOKEN = "wrong token"  # noqa: S105 - not a secret
    TOKEN = "token"  # noqa: S105 - not a secret


def check_source(request: Request, rules: AccessRules) -> None:
    """Refuse a request that a browser may have sent on behalf of another site."""
    if request.method not in METHODS:
        raise HttpError(405, f"{request.method} is not supported here", headers=(("Allow", ", ".join(METHODS)),))
    host = request.headers.get("host", "")
    if not _is_own_host(host, rules):
        raise HttpError(403, f"this page is not served as '{host[:100]}'", hint=_OPEN_HINT)
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        raise HttpError(403, f"requests from {request.headers['origin'][:100]} are refused")
    if _is_cross_site(request) and not _is_navigation(request):
        raise HttpError(403, "requests from other sites are refused")


def credential_of(request: Request, rules: AccessRules) -> Credential:
    token = request.query.get("token") if request.path == PAGE else None
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if token is None and scheme.lower() == "bearer":
        token = bearer.strip()
    if token is not None:
        return Credential.TOKEN if _is_same(token, rules.token) else Credential.WRONG_TOKEN
    return Credential.NONE


def check_rights(request: Request, credential: Credential, rules: AccessRules) -> None:
    """Refuse a request that this credential does not allow."""
    if credential is not Credential.TOKEN:
        raise HttpError(401, "this page needs its token", hint=_OPEN_HINT, headers=(("WWW-Authenticate", "Bearer"),))
    _check_right(request, rules)
    if request.path == API + EVENTS:
        for target in watched_targets(request):
            _check_right(target_request(target), rules)
    if request.method != "POST":
        return
    headers = request.headers
    if _JSON.fullmatch(headers.get("content-type", "")) is None:
        raise HttpError(415, "a change has to be sent as JSON", hint="Content-Type: application/json")


def _is_cross_site(request: Request) -> bool:
    """Return whether the browser reports another site as the origin. `none` is a user who typed the address.

    Other programs and old browsers report nothing and count as the same site.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    return site != "same-origin" and not (site == "none" and request.method != "POST")


def _is_own_host(host: str, rules: AccessRules) -> bool:
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return False
    if match[1] in rules.names or not rules.accepts_addresses:
        return match[1] in rules.names
    try:
        ipaddress.ip_address(match[1].strip("[]"))
    except ValueError:
        return False
    return True


def _is_navigation(request: Request) -> bool:
    """Return whether a user followed a link to the page in a whole tab, not in a frame."""
    get = request.headers.get
    is_whole = get("sec-fetch-mode") == "navigate" and get("sec-fetch-dest") == "document"
    return request.path == PAGE and request.method != "POST" and is_whole


def _check_right(request: Request, rules: AccessRules) -> None:
    if request.path.startswith(_NOT_FOR_PAGES):
        message = f"the web page may not use {request.path}"
        raise HttpError(403, message, hint="use the `gpuyard` command on the machine")
    if rules.is_read_only and request.method == "POST":
        raise HttpError(403, "this page is read-only", hint="`gpuyard web --stop`, then open it without `--read-only`")
    if rules.is_read_only and "environment" in request.query:
        raise HttpError(403, "a read-only page does not show environment variables")


def _is_same(given: str, own: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), own.encode())
