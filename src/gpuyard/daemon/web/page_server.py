"""Answer the requests of the web page: the page, its files, and the daemon's routes as far as `access_rules` allow.

Rate limits are separate: refused requests never use up the limit of the page's owner, and wrong tokens, however many,
never lock out the right one.
"""

import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from gpuyard.daemon.server.connection import Handler, HttpAnswer
from gpuyard.daemon.server.http_parser import HttpError, Request, Response, ResponseStream, StreamClient, error_response
from gpuyard.daemon.web.access_rules import (
    PAGE,
    AccessRules,
    Credential,
    check_rights,
    check_source,
    cookie_name,
    cookie_value,
    credential_of,
    is_cross_site,
)
from gpuyard.daemon.web.page_files import INDEX, File, answer_file, forward_page, locked_page
from gpuyard.schema.machine import PageSession
from gpuyard.system.process_identity import user_name
from gpuyard.version import API

MAX_STREAMS = 64
_BURST, _PER_S = 200, 100
_WRONG_TOKENS_BURST, _WRONG_TOKENS_PER_S = 10, 10 / 60
_STATIC = "/static/"
_SESSION = f"{API}/session"


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
        self._requests = Bucket(_BURST, _PER_S)
        self._wrong_tokens = Bucket(_WRONG_TOKENS_BURST, _WRONG_TOKENS_PER_S)
        self._streams = 0

    def check_head(self, request: Request) -> None:
        """Refuse a request by its head, before its body has arrived."""
        check_source(request, self.rules)
        credential = credential_of(request, self.rules)
        if credential is Credential.WRONG_TOKEN:
            self._take(self._wrong_tokens, "too many wrong tokens")
        if request.path != PAGE or request.method == "POST":
            check_rights(request, credential, self.rules)

    def handle(self, request: Request) -> HttpAnswer | Awaitable[HttpAnswer]:
        """Answer a request that `check_head` has accepted."""
        if request.path == PAGE:
            return self._page(request)
        if request.path.startswith(_STATIC):  # not limited: a browser that restores 20 tabs requests hundreds
            return answer_file(self._files, request.path.removeprefix(_STATIC), request)
        self._take(self._requests, "too many requests")
        if request.path == _SESSION:
            return self._session()
        answer = self._handle(request)
        return (
            self._limit_streams(answer)
            if isinstance(answer, Response | ResponseStream)
            else self._limit_streams_later(answer)
        )

    def _page(self, request: Request) -> Response:
        credential = credential_of(request, self.rules)
        if credential is Credential.TOKEN:
            value = f"{cookie_name(request)}={cookie_value(self.rules.token)}"
            return forward_page((("Set-Cookie", f"{value}; HttpOnly; SameSite=Strict; Path=/"),))
        if credential is Credential.COOKIE:
            return answer_file(self._files, INDEX, request)
        return forward_page() if is_cross_site(request) and "token" not in request.query else locked_page()

    def _session(self) -> Response:
        session = PageSession(read_only=self.rules.is_read_only, user=user_name(os.getuid()), host=socket.gethostname())
        return Response(body=msgspec.json.encode(session))

    def _take(self, bucket: Bucket, refusal: str) -> None:
        wait_s = math.ceil(bucket.take(self._clock()))
        if wait_s:
            raise HttpError(429, refusal, hint=f"try again in {wait_s} s", headers=(("Retry-After", str(wait_s)),))

    async def _limit_streams_later(self, answer: Awaitable[HttpAnswer]) -> HttpAnswer:
        return self._limit_streams(await answer)

    def _limit_streams(self, answer: HttpAnswer) -> HttpAnswer:
        if isinstance(answer, Response):
            return answer
        if self._streams >= MAX_STREAMS:
            message = f"{MAX_STREAMS} event streams are open, which is the limit"
            return error_response(503, message, "close other tabs with this page", (("Retry-After", "5"),))
        return msgspec.structs.replace(answer, start=lambda client: self._start_stream(answer, client))

    def _start_stream(self, stream: ResponseStream, client: StreamClient) -> Callable[[], object]:
        leave = stream.start(client)
        self._streams += 1

        def end() -> None:
            self._streams -= 1
            leave()

        return end
