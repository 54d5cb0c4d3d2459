"""Open and close the web page: on request of `gpuyard web` over the unix socket, or as configured.

A request that matches the open page changes nothing; a different one closes the page and opens it again.
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


class _OpenPage(Struct, frozen=True, kw_only=True):
    settings: PageRequest
    bound: BoundAddress
    rules: AccessRules
    server: Server


class PageListener:
    def __init__(self, handle: Handler, folder: Path) -> None:
        self._handle = handle
        self._token_path = folder / "web.token"
        self._page: _OpenPage | None = None
        self._opening = asyncio.Lock()

    def routes(self) -> Routes:
        return {
            ("GET", "/web"): lambda _: self._state(),
            ("POST", "/web"): lambda request: self.open(decode_body(request, PageRequest)),
            ("POST", "/web/stop"): self._stop,
        }

    async def open_as_configured(self, on_notice: Callable[[str], None]) -> None:
        """Open the page at the start of the daemon, if it is enabled. A failure is reported, not raised."""
        try:
            if load_config().page.enabled:
                state = await self.open(PageRequest())
                _log.info("the web page is at %s:%s", state.address, state.port)
        except GpuyardError as error:
            notice = f"the web page is not open: {error}"
            _log.error("%s", notice)
            on_notice(notice)

    async def open(self, wanted: PageRequest) -> PageState:
        async with self._opening:
            if self._page is None or not _matches(wanted, self._page):
                await self._reopen(_complete(wanted, self._page))
            return self._state()

    def close(self) -> None:
        if self._page is not None:
            self._page.server.close()
            self._page = None

    async def _reopen(self, settings: PageRequest) -> None:
        if self._page is not None and settings.port == self._page.bound.port:
            self.close()  # to free the port
        # In a thread: the lookup of a name can take seconds.
        bound = await asyncio.to_thread(bind, settings.address or LOCAL, settings.port)
        self.close()
        try:
            token = make_token(self._token_path) if settings.new_token else read_token(self._token_path)
            rules = AccessRules(
                token=token,
                names=bound.names,
                accepts_addresses=bound.accepts_addresses,
                is_read_only=bool(settings.read_only),
            )
            server = await serve_page(bound, PageServer(self._handle, rules, load_files()))
        except BaseException:
            bound.listening.close()
            raise
        self._page = _OpenPage(settings=settings, bound=bound, rules=rules, server=server)

    def _stop(self, _: Request) -> PageStopResult:
        was_open = self._page is not None
        self.close()
        return PageStopResult(stopped=was_open)

    def _state(self) -> PageState:
        if self._page is None:
            return PageState()
        bound, rules = self._page.bound, self._page.rules
        return PageState(
            url=f"http://{bound.host}:{bound.port}/?token={rules.token}",
            address=bound.address,
            port=bound.port,
            read_only=rules.is_read_only,
            notes=_notes(self._page),
        )


def _matches(wanted: PageRequest, page: _OpenPage) -> bool:
    """Return whether the open page is what is wanted."""
    return (
        not wanted.new_token
        and wanted.address in (None, page.settings.address, page.bound.address)
        and wanted.port in (None, page.settings.port, page.bound.port)
        and wanted.read_only in (None, page.settings.read_only)
    )


def _complete(wanted: PageRequest, page: _OpenPage | None) -> PageRequest:
    """Fill in what the request leaves open: from the open page, else from the configuration."""
    config = load_config().page
    before = (
        page.settings if page else PageRequest(address=config.address, port=config.port, read_only=config.read_only)
    )
    port = page.bound.port if page and wanted.address in (None, page.settings.address) else before.port
    return PageRequest(
        address=before.address if wanted.address is None else wanted.address,
        port=port if wanted.port is None else wanted.port,
        read_only=before.read_only if wanted.read_only is None else wanted.read_only,
        new_token=wanted.new_token,
    )


def _notes(page: _OpenPage) -> list[str]:
    bound, notes = page.bound, []
    if page.settings.port is None and bound.port != DEFAULT_PORT:
        notes.append(f"port {DEFAULT_PORT} is in use; the page is on port {bound.port}")
    if not bound.is_loopback:
        notes.append(f"others can reach {bracketed(bound.address)}, and the connection is not encrypted")
    return notes
