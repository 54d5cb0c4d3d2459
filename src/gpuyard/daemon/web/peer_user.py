"""Find the user at the other end of a connection from this machine (Linux only), and refuse other users.

Cookies belong to a host, not to a port: a browser sends ours to any server on 127.0.0.1, also to one of another user.
So where the kernel reports the user of a connection, only the page's own user and root are accepted; the token or the
cookie is not enough.

The kernel forgets a closed socket, or reports it as root's in older versions. What was sent before can still be read,
so a peer that cannot be found has gone and is refused. Where the kernel answers neither directly nor by its list, or
the list lacks even our own socket, the user is unknown and the token has to do.

A process of this machine may connect from any address of the machine, also to 127.0.0.1.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from gpuyard.daemon.web.socket_owner import Owner, find_owner

_LISTENING = "0A"
_SOCKET_LISTS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_GONE = "the client has closed the connection"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def refuse_other_users(connection: socket.socket) -> str | None:
    """Return why the client is refused, or None."""
    if sys.platform != "linux":
        return None
    try:
        own, peer = connection.getsockname(), connection.getpeername()
    except OSError:
        return _GONE
    theirs, ours = (plain(peer[0]), peer[1]), (plain(own[0]), own[1])
    if not is_local(theirs[0], ours[0]) and theirs[0] not in _own_addresses():
        return None
    try:
        return _check_owner(find_owner(theirs, ours), os.getuid())
    except OSError:
        return check_listed(_read_lists(), theirs, ours, os.getuid())


def _check_owner(owner: Owner | None, me: int) -> str | None:
    if owner is None or owner.inode == 0:
        return _GONE
    return None if owner.uid in (me, 0) else "this page belongs to another user"


def check_listed(lines: Iterable[str], peer: tuple[_Address, int], own: tuple[_Address, int], me: int) -> str | None:
    """Check the owner of the socket from `peer` to `own` in the lines of /proc/net/tcp."""
    theirs, ours = listed_names(*peer), listed_names(*own)
    is_complete = False  # whether our own socket is listed
    for _, local, remote, state, *others in map(str.split, lines):
        is_complete = is_complete or (state == _LISTENING and local.endswith(f":{own[1]:04X}"))
        if local in theirs and remote in ours:
            return _check_owner(Owner(int(others[3]), int(others[5])), me)
    return _GONE if is_complete else None


def is_local(peer: _Address, own: _Address) -> bool:
    """Return whether the two addresses prove that the peer is on this machine."""
    return peer.is_loopback or own.is_loopback or peer == own


def _own_addresses() -> set[_Address]:
    addresses = (each for interface in psutil.net_if_addrs().values() for each in interface)
    return {plain(each.address) for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)}


def plain(address: str) -> _Address:
    """Parse an address. A dual-stack socket reports IPv4 addresses in IPv6 form; return those as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def listed_names(address: _Address, port: int) -> set[str]:
    """Return the forms in which the kernel lists this end: each 4 bytes as one number in host byte order."""
    forms = [address.packed]
    if isinstance(address, ipaddress.IPv4Address):
        forms.append(ipaddress.IPv6Address(f"::ffff:{address}").packed)
    return {
        "".join(f"{word:08X}" for word in struct.unpack(f"={len(form) // 4}I", form)) + f":{port:04X}" for form in forms
    }


def _read_lists() -> list[str]:
    lines: list[str] = []
    for path in _SOCKET_LISTS:
        try:
            lines += path.read_text().splitlines()[1:]
        except OSError:
            continue
    return lines
