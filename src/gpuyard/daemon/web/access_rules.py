"""Who may ask what over the page's listener. Pure: a request's head in, a refusal or nothing out.

Rules:
- Asked for by a name of ours, or refused: a stranger's name that leads here (DNS rebinding) gets nobody in.
- A browser says where a request comes from (`Origin`, `Sec-Fetch-Site`): from elsewhere nothing is answered but a visit
  to the page itself, where no cookie counts; it is sent on from there, and then comes from the page's own place.
- Who changes something sends JSON, which no form can, and with a cookie says where from.
- A script shows the token, a browser the cookie that it got for it. The cookie does not tell the token.
- What is watched is asked for: it is allowed where it could be asked.
"""

import enum
import hashlib
import hmac
import ipaddress
import re

from msgspec import Struct

from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.daemon.server.watch_targets import EVENTS, target_request, watched_targets
from gpuyard.version import API

PAGE = "/"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
METHODS = ("GET", "HEAD", "POST")
_NOT_FOR_PAGES = (f"{API}/stop", f"{API}/web")
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_JSON = re.compile(r"application/json(;.*)?", re.IGNORECASE)
_ASK = "run `gpuyard web` on the machine, and open what it prints"


class AccessRules(Struct, frozen=True, kw_only=True):
    """What a listener goes by. `takes_addresses`: it is bound to all of the machine's, and any may be named; a name
    server leads names astray, and not addresses."""

    token: str
    names: frozenset[str] = LOOPBACK
    takes_addresses: bool = False
    is_read_only: bool = False


class Credential(enum.Enum):
    NONE = "none"
    WRONG_TOKEN = "wrong token"  # noqa: S105 - a word for it
    TOKEN = "token"  # noqa: S105 - as above
    COOKIE = "cookie"


def check_source(request: Request, terms: AccessRules) -> None:
    """Whether a browser could send this without the user's will."""
    if request.method not in METHODS:
        raise HttpError(405, f"{request.method} is not taken here", headers=(("Allow", ", ".join(METHODS)),))
    host = request.headers.get("host", "")
    if not _is_ours(host, terms):
        raise HttpError(403, f"this page is not at '{host[:100]}'", hint=_ASK)
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        raise HttpError(403, f"nothing is answered to {request.headers['origin'][:100]}")
    if is_from_elsewhere(request) and not _is_visit(request):
        raise HttpError(403, "nothing is answered to other sites")


def credential_of(request: Request, terms: AccessRules) -> Credential:
    token = request.query.get("token") if request.path == PAGE else None
    scheme, _, told = request.headers.get("authorization", "").partition(" ")
    if token is None and scheme.lower() == "bearer":
        token = told.strip()
    if token is not None:
        return Credential.TOKEN if _is_same(token, terms.token) else Credential.WRONG_TOKEN
    if is_from_elsewhere(request):
        return Credential.NONE
    own, name = cookie_value(terms.token), cookie_name(request)
    # Whoever serves on another port of this host can add one of the same name: ours is then one of two.
    is_ours = [_is_same(value, own) for key, value in _cookies(request) if key == name]
    return Credential.COOKIE if any(is_ours) else Credential.NONE


def check_rights(request: Request, credential: Credential, terms: AccessRules) -> None:
    """Of somebody who has shown who they are."""
    if credential in (Credential.NONE, Credential.WRONG_TOKEN):
        raise HttpError(401, "this page is locked", hint=_ASK, headers=(("WWW-Authenticate", "Bearer"),))
    _check_right(request, terms)
    if request.path == API + EVENTS:
        for target in watched_targets(request):
            _check_right(target_request(target), terms)
    if request.method == "POST":
        _check_change(request, credential)


def is_from_elsewhere(request: Request) -> bool:
    """As the browser says; other programs, and old browsers, say nothing. `none` is the user's own hand."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    return site != "same-origin" and not (site == "none" and request.method != "POST")


def cookie_name(request: Request) -> str:
    """By the port as the browser knows it: cookies are a host's, and several forwarded pages are on one."""
    match = _HOST.fullmatch(request.headers.get("host", "").lower())
    return f"gpuyard-{match[2] or 80 if match else 80}"


def cookie_value(token: str) -> str:
    return hmac.new(token.encode(), b"the page of gpuyard", hashlib.sha256).hexdigest()


def _is_ours(host: str, terms: AccessRules) -> bool:
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return False
    return match[1] in terms.names or (terms.takes_addresses and _is_address(match[1]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_visit(request: Request) -> bool:
    """Somebody followed a link to the page, and it is the whole of what they see."""
    told = request.headers.get
    is_whole = told("sec-fetch-mode") == "navigate" and told("sec-fetch-dest") == "document"
    return request.path == PAGE and request.method != "POST" and is_whole


def _check_right(request: Request, terms: AccessRules) -> None:
    if request.path.startswith(_NOT_FOR_PAGES):
        raise HttpError(403, f"{request.path} is not for pages", hint="use `gpuyard` on the machine")
    if terms.is_read_only and request.method == "POST":
        raise HttpError(403, "this page is for looking only", hint="`gpuyard web --stop`, then without `--read-only`")
    if terms.is_read_only and "environment" in request.query:
        raise HttpError(403, "the values of variables are not shown on a page that is for looking only")


def _check_change(request: Request, credential: Credential) -> None:
    told = request.headers
    if _JSON.fullmatch(told.get("content-type", "")) is None:
        raise HttpError(415, "a change is sent as JSON", hint="Content-Type: application/json")
    if credential is Credential.COOKIE and not {"origin", "sec-fetch-site"} & told.keys():
        raise HttpError(403, "where does this come from?", hint="a script shows the token: Authorization: Bearer …")


def _cookies(request: Request) -> list[tuple[str, str]]:
    pairs = (pair.partition("=") for pair in request.headers.get("cookie", "").split(";"))
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _is_same(told: str, own: str) -> bool:
    return hmac.compare_digest(told.encode("utf-8", "replace"), own.encode())
