"""Opens and closes the daemon's page, as `gpuyard web` asks over the daemon's own socket, or the configuration says.

Asked again for what is open, nothing is done; asked for something else, it is closed and opened anew.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpuyard.config import load_config
from gpuyard.daemon.api.codec import decode_body
from gpuyard.daemon.server.connection import Handler, Server
from gpuyard.daemon.server.http_parser import Request
from gpuyard.daemon.server.router import Routes
from gpuyard.daemon.web.access_rules import AccessRules
from gpuyard.daemon.web.listener import DEFAULT_PORT, BoundAddress, bind, bracketed, serve_page
from gpuyard.daemon.web.page_server import PageServer
from gpuyard.daemon.web.static_files import load_files
from gpuyard.daemon.web.token_file import make_token, read_token
from gpuyard.errors import GpuyardError
from gpuyard.schema.machine import PageState, PageStopResult
from gpuyard.schema.requests import PageRequest

LOCAL = "127.0.0.1"
_log = logging.getLogger(__name__)


class _Open(Struct, frozen=True, kw_only=True):
    asked: PageRequest
    bound: BoundAddress
    front: PageServer
    server: Server


class PageListener:
    def __init__(self, handle: Handler, folder: Path) -> None:
        self._handle = handle
        self._token_path = folder / "web.token"
        self._open: _Open | None = None
        self._opening = asyncio.Lock()

    def routes(self) -> Routes:
        return {
            ("GET", "/web"): lambda _: self._told(),
            ("POST", "/web"): lambda request: self.open(decode_body(request, PageRequest)),
            ("POST", "/web/stop"): self._stop,
        }

    async def open_as_configured(self, tell: Callable[[str], None]) -> None:
        """At the daemon's start, which nothing that fails here prevents."""
        try:
            if load_config().page.enabled:
                told = await self.open(PageRequest())
                _log.info("the page is at %s:%s", told.address, told.port)
        except GpuyardError as error:
            notice = f"the page is not served: {error}"
            _log.error("%s", notice)
            tell(notice)

    async def open(self, asked: PageRequest) -> PageState:
        async with self._opening:
            if self._open is None or not _is_content(asked, self._open):
                await self._open_anew(_complete(asked, self._open))
            return self._told()

    def close(self) -> None:
        if self._open is not None:
            self._open.server.close()
            self._open = None

    async def _open_anew(self, asked: PageRequest) -> None:
        if self._open is not None and asked.port == self._open.bound.port:
            self.close()  # the port is wanted again
        # To look a name up can take seconds.
        bound = await asyncio.get_running_loop().run_in_executor(None, bind, asked.address or LOCAL, asked.port)
        self.close()
        try:
            front = PageServer(self._handle, self._terms(asked, bound), load_files())
            server = await serve_page(bound, front)
        except BaseException:
            bound.listening.close()
            raise
        self._open = _Open(asked=asked, bound=bound, front=front, server=server)

    def _terms(self, asked: PageRequest, bound: BoundAddress) -> AccessRules:
        token = make_token(self._token_path) if asked.new_token else read_token(self._token_path)
        return AccessRules(
            token=token,
            names=bound.names,
            takes_addresses=bound.takes_addresses,
            is_read_only=bool(asked.read_only),
        )

    def _stop(self, _: Request) -> PageStopResult:
        was_open = self._open is not None
        self.close()
        return PageStopResult(stopped=was_open)

    def _told(self) -> PageState:
        if self._open is None:
            return PageState()
        bound, terms = self._open.bound, self._open.front.terms
        return PageState(
            url=f"http://{bound.host}:{bound.port}/?token={terms.token}",
            address=bound.address,
            port=bound.port,
            read_only=terms.is_read_only,
            notes=_notes(self._open),
        )


def _is_content(asked: PageRequest, there: _Open) -> bool:
    """Whether what is open is what is asked for."""
    return (
        not asked.new_token
        and asked.address in (None, there.asked.address, there.bound.address)
        and asked.port in (None, there.asked.port, there.bound.port)
        and asked.read_only in (None, there.asked.read_only)
    )


def _complete(asked: PageRequest, there: _Open | None) -> PageRequest:
    page = load_config().page
    before = there.asked if there else PageRequest(address=page.address, port=page.port, read_only=page.read_only)
    port = there.bound.port if there and asked.address in (None, there.asked.address) else before.port
    return PageRequest(
        address=before.address if asked.address is None else asked.address,
        port=port if asked.port is None else asked.port,
        read_only=before.read_only if asked.read_only is None else asked.read_only,
        new_token=asked.new_token,
    )


def _notes(there: _Open) -> list[str]:
    bound, notes = there.bound, []
    if there.asked.port is None and bound.port != DEFAULT_PORT:
        notes.append(f"port {DEFAULT_PORT} is taken, so it is {bound.port}")
    if not bound.is_loopback:
        notes.append(f"others can reach {bracketed(bound.address)}, and what is sent is not encrypted")
    return notes
