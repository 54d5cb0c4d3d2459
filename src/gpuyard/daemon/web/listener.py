"""The page's socket: where it is bound, what it may be called, and who is let in at the door."""

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
_TRIED = 20
# What the kernel keeps for a viewer that does not read comes on top of `unread_bytes`.
_SEND_BUFFER = 256 * 1024
LIMITS = ConnectionLimits(connections=128, silent_s=10.0, body_bytes=8 * 1024 * 1024)


class BoundAddress(Struct, frozen=True, kw_only=True):
    """A socket, and the names that a browser may have for it."""

    listening: socket.socket
    address: str
    port: int
    names: frozenset[str]
    takes_addresses: bool

    @property
    def is_loopback(self) -> bool:
        return plain(self.address).is_loopback

    @property
    def host(self) -> str:
        """What somebody would type."""
        return socket.gethostname() if self.takes_addresses else bracketed(self.address)


def bind(address: str, port: int | None) -> BoundAddress:
    """To that port; where none is named, to the first that is free from the usual one on."""
    tried = range(DEFAULT_PORT, DEFAULT_PORT + _TRIED) if port is None else (port,)
    family, at = _resolve(address)
    for number in tried:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # some vanish without a word
            listening.bind((at, number))
            listening.listen(LIMITS.connections)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
                raise _not_ours(address) from error
            raise _cannot_bind(at, number, error) from error
        return _as_bound(listening, address)
    raise AssertionError("the last one tried is bound, or told")


async def serve_page(bound: BoundAddress, front: PageServer) -> Server:
    server = Server(front.handle, LIMITS, refuse_other_users, front.vet, common_headers=HEADERS)
    await server.start(bound.listening)
    return server


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _resolve(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise _not_ours(address) from error
    family, _, _, _, (at, *_) = found[0]
    return family, str(at)


def _as_bound(listening: socket.socket, asked: str) -> BoundAddress:
    at, port = listening.getsockname()[:2]
    is_any = ipaddress.ip_address(at.partition("%")[0]).is_unspecified
    own = {socket.gethostname().lower(), socket.getfqdn().lower()} if is_any else {bracketed(at)}
    names = LOOPBACK | own | {bracketed(asked.lower())}
    return BoundAddress(listening=listening, address=at, port=port, names=names, takes_addresses=is_any)


def _not_ours(address: str) -> UserError:
    return UserError(f"'{address}' is no address of this machine", hint="such as 127.0.0.1, or 0.0.0.0 for all")


def _cannot_bind(address: str, port: int, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the page cannot be served at {bracketed(address)}:{port}: {error.strerror}",
        hint="another port with --port, or --port 0 for any" if error.errno == errno.EADDRINUSE else None,
    )
