"""Who may connect to the daemon: its own user and root by the unix socket, and strangers to the page in small numbers.

- The socket is a file that only its user can open, in a directory that only its user can write to. Every response on
  it carries the daemon's version, and a request may demand a minimum version.
- Strangers are clients of the page that have not sent their token yet, and may never do so. They never use up the
  connections of others, and there is always room for one more: the oldest connection of the network with the most
  strangers is dropped for it. So a client that sends its token at once gets in.
"""

import ipaddress
import socket
from pathlib import Path
from typing import Generic, TypeVar

from gpuyard.client.fast_http import AT_LEAST_FIELD, TOO_OLD, VERSION_FIELD
from gpuyard.daemon.server.http_messages import Headers, HttpError, Request
from gpuyard.errors import EnvironmentFault
from gpuyard.model.version_order import is_newer
from gpuyard.system import user_sockets
from gpuyard.system.private_files import make_folder
from gpuyard.version import __version__

COMMON_HEADERS: Headers = ((VERSION_FIELD, __version__),)


def refuse_if_too_old(request: Request) -> bool:
    """Refuse a request that demands a newer daemon than this one, before anything is done. Otherwise return True."""
    wanted = request.headers.get(AT_LEAST_FIELD.lower(), __version__)
    if wanted != __version__ and is_newer(wanted, __version__):
        raise HttpError(
            TOO_OLD,
            f"the daemon is version {__version__}, but the request needs at least {wanted[:100]}",
            hint="`gpuyard daemon restart` (running jobs go on)",
        )
    return True


def refuse_other_users(connection: socket.socket) -> str | None:
    """Return why the client is refused, or None."""
    return None if user_sockets.is_same_user(connection) else "this daemon belongs to another user"


def bind(path: Path) -> socket.socket:
    try:
        make_folder(str(path.parent))
        return user_sockets.bind(str(path))
    except OSError as error:
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be created: {error.strerror or error}",
            hint="set GPUYARD_HOME to another directory",
        ) from error


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


T = TypeVar("T")


class StrangerLimit(Generic[T]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._networks: dict[str, dict[T, None]] = {}  # the oldest first
        self._network_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._network_of)

    def all(self) -> list[T]:
        return list(self._network_of)

    def add(self, stranger: T, network: str) -> T | None:
        """Add a stranger. Return the one that has to go for it, or None."""
        dropped = None
        if len(self._network_of) >= self._most:
            largest = max(self._networks.values(), key=len)
            dropped = next(iter(largest))
            self.discard(dropped)
        self._networks.setdefault(network, {})[stranger] = None
        self._network_of[stranger] = network
        return dropped

    def discard(self, stranger: T) -> None:
        network = self._network_of.pop(stranger, None)
        if network is not None:
            del self._networks[network][stranger]
            if not self._networks[network]:
                del self._networks[network]


def network_of(peer: object) -> str:
    """Return the network of a peer's socket address: an IPv4 address, or the first 64 bits of an IPv6 address."""
    if not isinstance(peer, tuple):  # None: the client has gone
        return ""
    found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))  # one customer usually has that many addresses
    return str(getattr(found, "ipv4_mapped", None) or found)
