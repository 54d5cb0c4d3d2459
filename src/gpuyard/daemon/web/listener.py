"""The socket of the web page: bind it, and find the host names under which browsers may use it."""

import errno
import ipaddress
import socket

from msgspec import Struct

from gpuyard.daemon.server.connection import ConnectionLimits, Server
from gpuyard.daemon.web.access_rules import LOOPBACK
from gpuyard.daemon.web.locked_page import HEADERS
from gpuyard.daemon.web.page_server import PageServer
from gpuyard.daemon.web.peer_user import plain, refuse_other_users
from gpuyard.errors import EnvironmentFault, UserError

ANY_PORT = 0
DEFAULT_PORT = 8765
_PORTS_TRIED = 20
# The kernel buffers this for a client that does not read, in addition to `unread_bytes`.
_SEND_BUFFER = 256 * 1024
LIMITS = ConnectionLimits(connections=128, silent_s=10.0, body_bytes=8 * 1024 * 1024)


class BoundAddress(Struct, frozen=True, kw_only=True):
    """A listening socket, and the host names that a browser may use for it."""

    listening: socket.socket
    address: str
    port: int
    names: frozenset[str]
    accepts_addresses: bool

    @property
    def is_loopback(self) -> bool:
        return plain(self.address).is_loopback

    @property
    def host(self) -> str:
        """The host part of the address to open."""
        return socket.gethostname() if self.accepts_addresses else bracketed(self.address)


def bind(address: str, port: int | None) -> BoundAddress:
    """Bind to `port`, or without one to the first free port of the 20 from 8765 on."""
    tried = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED) if port is None else (port,)
    family, at = _resolve(address)
    for number in tried:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices clients that vanish
            listening.bind((at, number))
            listening.listen(LIMITS.connections)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
                raise _unknown_address(address) from error
            raise _cannot_bind(at, number, error) from error
        return _as_bound(listening, address)
    raise AssertionError("the last port is bound or raises")


async def serve_page(bound: BoundAddress, page: PageServer) -> Server:
    server = Server(page.handle, LIMITS, refuse_other_users, page.check_head, common_headers=HEADERS)
    await server.start(bound.listening)
    return server


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _resolve(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise _unknown_address(address) from error
    family, _, _, _, (at, *_) = found[0]
    return family, str(at)


def _as_bound(listening: socket.socket, requested: str) -> BoundAddress:
    at, port = listening.getsockname()[:2]
    is_any = ipaddress.ip_address(at.partition("%")[0]).is_unspecified
    own = {socket.gethostname().lower(), socket.getfqdn().lower()} if is_any else {bracketed(at)}
    names = LOOPBACK | own | {bracketed(requested.lower())}
    return BoundAddress(listening=listening, address=at, port=port, names=names, accepts_addresses=is_any)


def _unknown_address(address: str) -> UserError:
    return UserError(f"'{address}' is not an address of this machine", hint="such as 127.0.0.1, or 0.0.0.0 for all")


def _cannot_bind(address: str, port: int, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the web page cannot be served at {bracketed(address)}:{port}: {error.strerror}",
        hint="choose another port with --port, or any free one with --port 0"
        if error.errno == errno.EADDRINUSE
        else None,
    )
