"""Whose a connection from this machine is, as far as Linux tells.

Cookies are a host's and not a port's: a browser shows ours to any server on 127.0.0.1, another user's among them. So a
key is not enough where it can be told who shows it: on the machine itself only the page's own user and root get in.

A socket that is closed is known no more, or to older kernels as root's. What was sent before can still be read, so
whoever cannot be found has gone, and is not let in. Where the kernel can be asked neither directly nor by its list, or
the list does not have our own socket in it, nothing can be told, and the key has to do.

Whoever is on this machine may come from any address of it, also to 127.0.0.1.
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

_LISTENS = "0A"
_LISTS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_GONE = "whoever asked has gone"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def refuse_other_users(connection: socket.socket) -> str | None:
    """Why whoever is at the other end is not let in, or `None`."""
    if sys.platform != "linux":
        return None
    try:
        own, peer = connection.getsockname(), connection.getpeername()
    except OSError:
        return _GONE
    theirs, ours = (plain(peer[0]), peer[1]), (plain(own[0]), own[1])
    if not is_here(theirs[0], ours[0]) and theirs[0] not in _own_addresses():
        return None
    try:
        return _judge(find_owner(theirs, ours), os.getuid())
    except OSError:
        return why_not(_listed(), theirs, ours, os.getuid())


def _judge(owner: Owner | None, me: int) -> str | None:
    if owner is None or owner.inode == 0:
        return _GONE
    return None if owner.uid in (me, 0) else "this page is another user's"


def why_not(lines: Iterable[str], peer: tuple[_Address, int], own: tuple[_Address, int], me: int) -> str | None:
    theirs, ours = listed_names(*peer), listed_names(*own)
    is_told = False
    for _, local, remote, state, *others in map(str.split, lines):
        is_told = is_told or (state == _LISTENS and local.endswith(f":{own[1]:04X}"))
        if local in theirs and remote in ours:
            return _judge(Owner(int(others[3]), int(others[5])), me)
    return _GONE if is_told else None


def is_here(peer: _Address, own: _Address) -> bool:
    """Whether their addresses alone say so."""
    return peer.is_loopback or own.is_loopback or peer == own


def _own_addresses() -> set[_Address]:
    told = (each for all_of_one in psutil.net_if_addrs().values() for each in all_of_one)
    return {plain(each.address) for each in told if each.family in (socket.AF_INET, socket.AF_INET6)}


def plain(address: str) -> _Address:
    """A socket for both kinds of addresses tells those of the older kind in the newer's form."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def listed_names(address: _Address, port: int) -> set[str]:
    """As the kernel writes them: each four bytes as one number of the machine's own kind."""
    forms = [address.packed]
    if isinstance(address, ipaddress.IPv4Address):
        forms.append(ipaddress.IPv6Address(f"::ffff:{address}").packed)
    return {
        "".join(f"{word:08X}" for word in struct.unpack(f"={len(form) // 4}I", form)) + f":{port:04X}" for form in forms
    }


def _listed() -> list[str]:
    lines: list[str] = []
    for path in _LISTS:
        try:
            lines += path.read_text().splitlines()[1:]
        except OSError:
            continue
    return lines
