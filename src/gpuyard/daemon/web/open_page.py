"""Open and close the web page: on request of `gpuyard web` over the unix socket, or as configured.

A request that matches the open page changes nothing; a different one closes the page and opens it again. The token is
in a file that only its user can read, so that open pages survive a daemon restart.
"""

import asyncio
import errno
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpuyard.config import load_config
from gpuyard.daemon.server.connection import ConnectionLimits, Handler, Server
from gpuyard.daemon.web.page_server import HEADERS, LOOPBACK, AccessRules, PageServer, load_files
from gpuyard.daemon.web.peer_user import plain, refuse_other_users
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.schema.machine import PageState, PageStopResult
from gpuyard.schema.requests import PageRequest
from gpuyard.system.private_files import PrivateFileError, open_own
from gpuyard.system.write_files import write_atomically

_log = logging.getLogger(__name__)
DEFAULT_PORT = 8765
_LIMITS = ConnectionLimits(connections=128, strangers=32, silent_s=5.0, body_bytes=8 * 1024 * 1024)


class _OpenPage(Struct, frozen=True, kw_only=True):
    settings: PageRequest
    address: str
    port: int
    rules: AccessRules
    server: Server


class PageListener:
    def __init__(self, handle: Handler, folder: Path) -> None:
        self._handle = handle
        self._token_path = folder / "web.token"
        self._page: _OpenPage | None = None
        self._opening = asyncio.Lock()

    async def open_as_configured(self, on_notice: Callable[[str], None]) -> None:
        """Open the page at the start of the daemon. A failure is reported, not raised."""
        try:
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
            return self.state()

    def close(self) -> None:
        if self._page is not None:
            self._page.server.close()
            self._page = None

    async def _reopen(self, settings: PageRequest) -> None:
        if self._page is not None and settings.port == self._page.port:
            self.close()  # to free the port
        # In a thread: the lookup of a name can take seconds.
        listening, names = await asyncio.to_thread(bind, settings.address or "127.0.0.1", settings.port)
        self.close()
        try:
            token = make_token(self._token_path) if settings.new_token else read_token(self._token_path)
            (address, port, *_), is_read_only = listening.getsockname(), bool(settings.read_only)
            accepts = plain(address).is_unspecified
            rules = AccessRules(token=token, names=names, accepts_addresses=accepts, is_read_only=is_read_only)
            page = PageServer(self._handle, rules, load_files())
            server = Server(page.handle, _LIMITS, refuse_other_users, page.check_head, common_headers=HEADERS)
            await server.start(listening)
        except BaseException:
            listening.close()
            raise
        self._page = _OpenPage(settings=settings, address=address, port=port, rules=rules, server=server)

    def stop(self) -> PageStopResult:
        was_open = self._page is not None
        self.close()
        return PageStopResult(stopped=was_open)

    def state(self) -> PageState:
        if self._page is None:
            return PageState()
        address, port, rules, notes = self._page.address, self._page.port, self._page.rules, []
        if self._page.settings.port is None and port != DEFAULT_PORT:
            notes.append(f"port {DEFAULT_PORT} is in use; the page is on port {port}")
        if not plain(address).is_loopback:
            notes.append(f"others can reach {bracketed(address)}, and the connection is not encrypted")
        host = socket.gethostname() if rules.accepts_addresses else bracketed(address)
        return PageState(
            url=f"http://{host}:{port}/?token={rules.token}",
            address=address,
            port=port,
            read_only=rules.is_read_only,
            notes=notes,
        )


def _matches(wanted: PageRequest, page: _OpenPage) -> bool:
    """Return whether the open page is what is wanted."""
    return (
        not wanted.new_token
        and wanted.address in (None, page.settings.address, page.address)
        and wanted.port in (None, page.settings.port, page.port)
        and wanted.read_only in (None, page.settings.read_only)
    )


def _complete(wanted: PageRequest, page: _OpenPage | None) -> PageRequest:
    """Fill in what the request leaves open: from the open page, else from the configuration."""
    config = load_config().page
    before = PageRequest(address=config.address, port=config.port, read_only=config.read_only)
    before = page.settings if page else before
    port = page.port if page and wanted.address in (None, page.settings.address) else before.port
    return PageRequest(
        address=before.address if wanted.address is None else wanted.address,
        port=port if wanted.port is None else wanted.port,
        read_only=before.read_only if wanted.read_only is None else wanted.read_only,
        new_token=wanted.new_token,
    )


def bind(address: str, port: int | None) -> tuple[socket.socket, frozenset[str]]:
    """Bind to `port`, or without one to the first free port of the 20 from 8765 on. Return the listening socket, and
    the host names that a browser may use for it."""
    tried = range(DEFAULT_PORT, DEFAULT_PORT + 20) if port is None else (port,)
    hint = "such as 127.0.0.1, or 0.0.0.0 for all"
    unknown = UserError(f"'{address}' is not an address of this machine", hint=hint)
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise unknown from error
    family, _, _, _, (at, *_) = found[0]
    for number in tried:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # For a client that does not read the kernel buffers this much, in addition to `unread_bytes`.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices clients that vanish
            listening.bind((at, number))
            listening.listen(_LIMITS.connections)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
                raise unknown from error
            hint = "choose another port with --port, or any free one with --port 0"
            raise EnvironmentFault(
                f"the web page cannot be served at {bracketed(str(at))}:{number}: {error.strerror}",
                hint=hint if error.errno == errno.EADDRINUSE else None,
            ) from error
        own = listening.getsockname()[0]
        is_any = plain(own).is_unspecified
        names = {socket.gethostname().lower(), socket.getfqdn().lower()} if is_any else {bracketed(own)}
        return listening, frozenset({*names, *LOOPBACK, bracketed(address.lower())})
    raise AssertionError("the last port is bound or raises")


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def read_token(path: Path) -> str:
    """Return the stored token; make a new one if there is none, it is malformed, or others could have read it."""
    try:
        with open(open_own(str(path), os.O_RDONLY), encoding="ascii") as file:
            token, mode = file.read(), os.fstat(file.fileno()).st_mode
    except (FileNotFoundError, PrivateFileError):
        return make_token(path)
    except (OSError, UnicodeDecodeError) as error:
        hint = "make a new one with `gpuyard web --new-token`"
        raise EnvironmentFault(f"{path} cannot be read: {error}", hint=hint) from error
    is_private = not mode & (stat.S_IRWXG | stat.S_IRWXO)
    return token if is_private and re.fullmatch(r"[A-Za-z0-9_-]{32,}", token) else make_token(path)


def make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        write_atomically(path, token.encode(), mode=0o600, is_synced=False)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error
    return token
