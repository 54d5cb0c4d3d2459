"""Connections of strangers: clients that have not sent their token yet, and may never do so.

Rules:
- Strangers never use up the connections of clients that have proven who they are.
- There is always room for one more: the oldest connection of the network with the most strangers is dropped for it. So
  clients of one network cannot keep out those of another, and a client that sends its token at once gets in.
"""

import ipaddress
from typing import Generic, TypeVar

T = TypeVar("T")
_IPV6_NETWORK = 64  # bits; one customer usually has at least that many addresses


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
        return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
