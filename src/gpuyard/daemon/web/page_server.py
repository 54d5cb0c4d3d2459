"""Answer the requests of the web page: the page, its files, and the daemon's routes as far as the access rules allow.

- The Host header has to be one of the page's own names, which defeats DNS rebinding. From another site only a
navigation to the page itself is answered. A change has to be JSON, which no HTML form can send.
- The token is sent as a header: browsers send cookies to all ports of a host. The page and its files need none: they
hold nothing of the user. A target can be watched if a request for it would be allowed.
- A file has to be named exactly, so path traversal is impossible. Refused requests never use up the limit of the page's
owner, and wrong tokens, however many, never lock out the right one.
"""

import hashlib
import hmac
import ipaddress
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.daemon.server import http_messages as http
from gpuyard.daemon.server.connection import Handler, HttpAnswer
from gpuyard.daemon.server.http_messages import EVENTS, HttpError, Request, target_request
from gpuyard.schema.machine import PageSession
from gpuyard.system.processes import user_name
from gpuyard.version import API

PAGE = "/"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
METHODS = ("GET", "HEAD", "POST")
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_JSON = re.compile(r"application/json(;.*)?", re.IGNORECASE)
_OPEN_HINT = "run `gpuyard web` on the machine and open the address it prints"


class AccessRules(Struct, frozen=True, kw_only=True):
    """`names` are the accepted host names. `accepts_addresses`: the listener is bound to all addresses of the machine,
    so any literal IP address is accepted, too; literal IP addresses cannot be DNS-rebound."""

    token: str
    names: frozenset[str] = LOOPBACK
    accepts_addresses: bool = False
    is_read_only: bool = False


def check_source(request: Request, rules: AccessRules) -> None:
    """Refuse a request that a browser may have sent on behalf of another site."""
    if request.method not in METHODS:
        raise HttpError(405, f"{request.method} is not supported here", headers=(("Allow", ", ".join(METHODS)),))
    host = request.headers.get("host", "")
    if not _is_own_host(host, rules):
        raise HttpError(403, f"this page is not served as '{host[:100]}'", hint=_OPEN_HINT)
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        raise HttpError(403, f"requests from {request.headers['origin'][:100]} are refused")
    # A browser reports the site that a request comes from; `none` is a user who typed the address. Other programs and
    # old browsers report nothing and count as the same site.
    get, is_post = request.headers.get, request.method == "POST"
    site = get("sec-fetch-site", "same-origin")
    is_whole_tab = get("sec-fetch-mode") == "navigate" and get("sec-fetch-dest") == "document"
    is_navigation = request.path == PAGE and not is_post and is_whole_tab
    if site != "same-origin" and not (site == "none" and not is_post) and not is_navigation:
        raise HttpError(403, "requests from other sites are refused")


def has_token(request: Request, rules: AccessRules) -> bool | None:
    """Return whether the request has the page's token; False: it has a wrong one, None: it has none."""
    token = request.query.get("token") if request.path == PAGE else None
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if token is None and scheme.lower() == "bearer":
        token = bearer.strip()
    return None if token is None else hmac.compare_digest(token.encode("utf-8", "replace"), rules.token.encode())


def check_rights(request: Request, rules: AccessRules, *, has_access: bool | None) -> None:
    """Refuse a request that is not allowed, or not without the token."""
    if not has_access:
        raise HttpError(401, "this page needs its token", hint=_OPEN_HINT, headers=(("WWW-Authenticate", "Bearer"),))
    _check_right(request, rules)
    if request.path == API + EVENTS:
        for target in request.query.get("watch", "").split():
            _check_right(target_request(target), rules)
    if request.method == "POST" and _JSON.fullmatch(request.headers.get("content-type", "")) is None:
        raise HttpError(415, "a change has to be sent as JSON", hint="Content-Type: application/json")


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


def _check_right(request: Request, rules: AccessRules) -> None:
    if request.path.startswith((f"{API}/stop", f"{API}/web")):
        message = f"the web page may not use {request.path}"
        raise HttpError(403, message, hint="use the `gpuyard` command on the machine")
    if rules.is_read_only and request.method == "POST":
        raise HttpError(403, "this page is read-only", hint="`gpuyard web --stop`, then open it without `--read-only`")
    if rules.is_read_only and "environment" in request.query:
        raise HttpError(403, "a read-only page does not show environment variables")


INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
# The page loads only its own files, runs no inline scripts, and cannot be framed or read by other sites.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: http.Headers = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_LOCKED = b"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>gpuyard</title></head>
<body><h1>gpuyard</h1>
<p>This page needs its token. Run <code>gpuyard web</code> on the machine and open the address it prints.</p></body>
</html>
"""
_STATIC = "/static/"


class File(Struct, frozen=True):
    body: bytes
    content_type: str
    etag: str


class Bucket:
    """A rate limit: a burst, then a number per second. The caller passes the time."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Take one and return 0, or return the seconds to wait until one is available."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class PageServer:
    def __init__(
        self,
        handle: Handler,
        rules: AccessRules,
        files: Mapping[str, File],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle, self.rules, self._files, self._clock = handle, rules, files, clock
        self._requests, self._wrong_tokens = Bucket(200, 100), Bucket(10, 10 / 60)
        self._streams = 0

    def check_head(self, request: http.Request) -> bool:
        """Refuse a request by its head, before its body has arrived. Return whether it has the token."""
        check_source(request, self.rules)
        has_access, headers = has_token(request, self.rules), request.headers
        if has_access is False:
            self._take(self._wrong_tokens, "too many wrong tokens")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        is_file = request.path == PAGE or request.path.startswith(_STATIC)
        if has_body or request.method == "POST" or not is_file:
            check_rights(request, self.rules, has_access=has_access)
        return bool(has_access)

    async def handle(self, request: http.Request) -> HttpAnswer:
        """Answer a request that `check_head` has accepted."""
        if request.path == PAGE:
            page, has_access = self._files[INDEX], has_token(request, self.rules)
            status, body = (401, _LOCKED) if has_access is False else (200, page.body)
            # Without the token the connection is not kept: the page's address may have it.
            return http.Response(status=status, body=body, content_type=page.content_type, is_last=not has_access)
        if request.path.startswith(_STATIC):  # not limited: a browser that restores 20 tabs requests hundreds
            return answer_file(self._files, request.path.removeprefix(_STATIC), request)
        self._take(self._requests, "too many requests")
        if request.path == f"{API}/session":
            user, host = user_name(os.getuid()), socket.gethostname()
            session = PageSession(read_only=self.rules.is_read_only, user=user, host=host)
            return http.Response(body=msgspec.json.encode(session))
        answer = await self._handle(request)
        if isinstance(answer, http.Response):
            return answer
        if self._streams >= 64:
            message = "64 event streams are open, which is the limit"
            return http.error_response(503, message, "close other tabs with this page", (("Retry-After", "5"),))
        return msgspec.structs.replace(answer, start=lambda client: self._start_stream(answer, client))

    def _take(self, bucket: Bucket, refusal: str) -> None:
        wait_s = math.ceil(bucket.take(self._clock()))
        if wait_s:
            raise http.HttpError(429, refusal, hint=f"try again in {wait_s} s", headers=(("Retry-After", str(wait_s)),))

    def _start_stream(self, stream: http.ResponseStream, client: http.StreamClient) -> Callable[[], object]:
        leave = stream.start(client)
        self._streams += 1

        def end() -> None:
            self._streams -= 1
            leave()

        return end


def answer_file(known: Mapping[str, File], name: str, request: http.Request) -> http.Response:
    file = known.get(name)
    if file is None:
        raise http.HttpError(404, f"there is no file {name[:100]}")
    # Browsers may cache a file but have to revalidate it: a daemon of another version has other files.
    headers = (("ETag", file.etag), ("Cache-Control", "no-cache"))
    if file.etag in request.headers.get("if-none-match", ""):
        return http.Response(status=304, content_type=file.content_type, headers=headers)
    return http.Response(body=file.body, content_type=file.content_type, headers=headers)


def load_files() -> dict[str, File]:
    """Return the files by their path below the directory, without files of other types."""
    folder, found = Path(__file__).parents[2] / "ui" / "web", dict[str, File]()
    for path in folder.rglob("*"):
        if path.suffix in _TYPES and path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = File(body, _TYPES[path.suffix], etag)
    return found
