"""Find the owner of one TCP socket of this machine over netlink (sock_diag(7)).

The list in /proc has the owner as well, but reading it takes milliseconds, more with many sockets: any client could
block the daemon that long by connecting.
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
_REQUEST = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
# Any interface, and any socket cookie.
_ANY_SOCKET = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# After the two ends: expiry, receive queue, send queue, uid, inode.
_OWNER = struct.Struct("=IIIII")
_ENDS_AT, _OWNER_AT = 4, 52


class Owner(Struct, frozen=True):
    """`inode` is 0 if no process has the socket any more."""

    uid: int
    inode: int


def find_owner(local: End, remote: End) -> Owner | None:
    """Return the owner of the socket from `local` to `remote`, or None. Raise OSError if the kernel does not answer."""
    found = _ask(local, remote)
    # ENOENT also means that sock_diag is unavailable; our own end exists, so try that to tell them apart.
    if found is None and _ask(remote, local) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return found


def _ask(local: End, remote: End) -> Owner | None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_request(local, remote))
        return _read(kernel.recv(4096), local, remote)


def _request(local: End, remote: End) -> bytes:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + _ends(local, remote) + _ANY_SOCKET
    return _HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


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
    # Without such a socket the kernel may return one that listens on that port.
    if body[_ENDS_AT : _ENDS_AT + _PORTS.size] != _PORTS.pack(local[1], remote[1]):
        return None
    *_, uid, inode = _OWNER.unpack_from(body, _OWNER_AT)
    return Owner(uid, inode)
