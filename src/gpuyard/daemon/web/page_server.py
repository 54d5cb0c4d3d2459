"""What the page's listener answers: the page, its files, and the daemon's routes, as far as the gate lets them through.

Bounds are kept apart: who is not let in never uses up what the owner of the page may ask, and wrong tokens, however
many, keep the right one out of nothing.
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
    is_from_elsewhere,
)
from gpuyard.daemon.web.locked_page import locked_page, onward_page
from gpuyard.daemon.web.static_files import INDEX, File, answer_file
from gpuyard.daemon.web.token_bucket import Bucket
from gpuyard.schema.machine import PageSession
from gpuyard.system.process_identity import user_name
from gpuyard.version import API

MOST_STREAMS = 64
_AT_ONCE, _EACH_S = 200, 100
_WRONG_TOKENS, _WRONG_TOKENS_EACH_S = 10, 10 / 60
_STATIC = "/static/"
_SESSION = f"{API}/session"


class PageServer:
    def __init__(
        self,
        handle: Handler,
        terms: AccessRules,
        files: Mapping[str, File],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle, self.terms, self._files, self._clock = handle, terms, files, clock
        self._requests = Bucket(_AT_ONCE, _EACH_S)
        self._wrong_tokens = Bucket(_WRONG_TOKENS, _WRONG_TOKENS_EACH_S)
        self._streams = 0

    def vet(self, request: Request) -> None:
        """Whether anything can come of it; its body need not be there yet."""
        check_source(request, self.terms)
        credential = credential_of(request, self.terms)
        if credential is Credential.WRONG_TOKEN:
            self._count_wrong_token()
        if request.path != PAGE or request.method == "POST":
            check_rights(request, credential, self.terms)

    def handle(self, request: Request) -> HttpAnswer | Awaitable[HttpAnswer]:
        """Of one that was vetted."""
        if request.path == PAGE:
            return self._page(request)
        if request.path.startswith(_STATIC):  # not counted: twenty tabs that a browser opens again ask for hundreds
            return answer_file(self._files, request.path.removeprefix(_STATIC), request)
        wait_s = self._requests.take(self._clock())
        if wait_s:
            raise _too_often("too much is asked at once", wait_s)
        if request.path == _SESSION:
            return self._session()
        answer = self._handle(request)
        return self._watched(answer) if isinstance(answer, Response | ResponseStream) else self._watched_later(answer)

    def _page(self, request: Request) -> Response:
        credential = credential_of(request, self.terms)
        if credential is Credential.TOKEN:
            value = f"{cookie_name(request)}={cookie_value(self.terms.token)}"
            return onward_page((("Set-Cookie", f"{value}; HttpOnly; SameSite=Strict; Path=/"),))
        if credential is Credential.COOKIE:
            return answer_file(self._files, INDEX, request)
        return onward_page() if is_from_elsewhere(request) and "token" not in request.query else locked_page(401)

    def _session(self) -> Response:
        session = PageSession(read_only=self.terms.is_read_only, user=user_name(os.getuid()), host=socket.gethostname())
        return Response(body=msgspec.json.encode(session))

    def _count_wrong_token(self) -> None:
        wait_s = self._wrong_tokens.take(self._clock())
        if wait_s:
            raise _too_often("too many wrong tokens", wait_s)

    async def _watched_later(self, answer: Awaitable[HttpAnswer]) -> HttpAnswer:
        return self._watched(await answer)

    def _watched(self, answer: HttpAnswer) -> HttpAnswer:
        if isinstance(answer, Response):
            return answer
        if self._streams >= MOST_STREAMS:
            message = f"{MOST_STREAMS} streams are open, and no more are"
            return error_response(503, message, "close a page that is open elsewhere", (("Retry-After", "5"),))
        return msgspec.structs.replace(answer, start=lambda client: self._start_stream(answer, client))

    def _start_stream(self, stream: ResponseStream, client: StreamClient) -> Callable[[], None]:
        leave = stream.start(client)
        self._streams += 1

        def end() -> None:
            self._streams -= 1
            leave()

        return end


def _too_often(message: str, wait_s: float) -> HttpError:
    return HttpError(429, message, hint="slower", headers=(("Retry-After", str(math.ceil(wait_s))),))
