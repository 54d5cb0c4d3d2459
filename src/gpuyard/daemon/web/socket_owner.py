"""Whose a TCP socket of this machine is, as Linux tells over netlink (sock_diag(7)): of one socket, at once.

The list in /proc has it, too, but to read that takes milliseconds, and many where there are many sockets: anybody who
knocks would hold the daemon up for so long.
"""

import errno
import ipaddress
import os
import socket
import struct

from msgspec import Struct

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address, int]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_HEAD = struct.Struct("=IHHII")
_ERROR = struct.Struct("=i")
_WANTED = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
# What is not told: the interface, and the socket's own number.
_ANY_SOCKET = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# Behind the sockets' ends: when it expires, what is queued either way, whose it is, and its inode.
_TOLD = struct.Struct("=IIIII")
_ENDS_AT, _TOLD_AT = 4, 52


class Owner(Struct, frozen=True):
    """`inode` is 0 for a socket that no process has any more."""

    uid: int
    inode: int


def find_owner(local: End, remote: End) -> Owner | None:
    """Of the socket between these two, seen from `local`; OSError where the kernel cannot be asked."""
    found = _ask(local, remote)
    # No such socket, and nobody to ask, are told alike; but the other end is ours, and there.
    if found is None and _ask(remote, local) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return found


def _ask(local: End, remote: End) -> Owner | None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_question(local, remote))
        return _read(kernel.recv(4096), local, remote)


def _question(local: End, remote: End) -> bytes:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    wanted = _WANTED.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + _ends(local, remote) + _ANY_SOCKET
    return _HEAD.pack(_HEAD.size + len(wanted), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + wanted


def _ends(local: End, remote: End) -> bytes:
    addresses = b"".join(address.packed.ljust(16, b"\0") for address, _ in (local, remote))
    return _PORTS.pack(local[1], remote[1]) + addresses


def _read(answer: bytes, local: End, remote: End) -> Owner | None:
    _, kind, *_ = _HEAD.unpack_from(answer)
    body = answer[_HEAD.size :]
    if kind == _NLMSG_ERROR:
        (negative,) = _ERROR.unpack_from(body)
        if negative == -errno.ENOENT:
            return None
        raise OSError(-negative, os.strerror(-negative))
    # Where there is no such socket, one that listens at that port may be told instead.
    if body[_ENDS_AT : _ENDS_AT + _PORTS.size] != _PORTS.pack(local[1], remote[1]):
        return None
    *_, uid, inode = _TOLD.unpack_from(body, _TOLD_AT)
    return Owner(uid, inode)
