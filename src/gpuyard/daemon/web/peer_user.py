"""Find the user at the other end of a connection from this machine (Linux only), and refuse other users.

When the daemon has ended, another user can take its port, and open pages then send the token there. So where the kernel
reports the user of a connection, only the page's own user and root are accepted; the token is not enough.

The kernel forgets a closed socket, or reports it as root's in older versions. What was sent before can still be read,
so a peer that cannot be found has gone and is refused. Where the kernel answers neither directly nor by its list, or
the list lacks even our own socket, the user is unknown and the token has to do.

A process of this machine may connect from any address of the machine, also to 127.0.0.1.

The kernel is asked over netlink (sock_diag(7)). The list in /proc has the owner as well, but reading it takes
milliseconds, more with many sockets: any client could block the daemon that long by connecting.
"""

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
from msgspec import Struct

_LISTENING = "0A"
_SOCKET_LISTS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_GONE = "the client has closed the connection"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address, int]


class Owner(Struct, frozen=True):
    """`inode` is 0 if no process has the socket any more."""

    uid: int
    inode: int


def refuse_other_users(connection: socket.socket) -> str | None:
    """Return why the client is refused, or None."""
    if sys.platform != "linux":
        return None
    try:
        own, peer = connection.getsockname(), connection.getpeername()
    except OSError:
        return _GONE
    theirs, ours = (plain(peer[0]), peer[1]), (plain(own[0]), own[1])
    if not is_local(theirs[0], ours[0]):
        listed = (each for interface in psutil.net_if_addrs().values() for each in interface)
        internet = (each for each in listed if each.family in (socket.AF_INET, socket.AF_INET6))
        if theirs[0] not in {plain(each.address) for each in internet}:
            return None
    try:
        return _check_owner(find_owner(theirs, ours), os.getuid())
    except OSError:
        return check_listed(_read_lists(), theirs, ours, os.getuid())


def _check_owner(owner: Owner | None, me: int) -> str | None:
    if owner is None or owner.inode == 0:
        return _GONE
    return None if owner.uid in (me, 0) else "this page belongs to another user"


def check_listed(lines: Iterable[str], peer: End, own: End, me: int) -> str | None:
    """Check the owner of the socket from `peer` to `own` in the lines of /proc/net/tcp."""
    theirs, ours = listed_names(*peer), listed_names(*own)
    is_complete = False  # whether our own socket is listed
    for _, local, remote, state, *others in map(str.split, lines):
        is_complete = is_complete or (state == _LISTENING and local.endswith(f":{own[1]:04X}"))
        if local in theirs and remote in ours:
            return _check_owner(Owner(int(others[3]), int(others[5])), me)
    return _GONE if is_complete else None


def is_local(peer: Address, own: Address) -> bool:
    """Return whether the two addresses prove that the peer is on this machine."""
    return peer.is_loopback or own.is_loopback or peer == own


def plain(address: str) -> Address:
    """Parse an address. A dual-stack socket reports IPv4 addresses in IPv6 form; return those as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def listed_names(address: Address, port: int) -> set[str]:
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


# The owner of one TCP socket of this machine, over netlink

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


def find_owner(local: End, remote: End) -> Owner | None:
    """Return the owner of the socket from `local` to `remote`, or None. Raise OSError if the kernel does not answer."""
    found = _ask(local, remote)
    # ENOENT also means that sock_diag is unavailable; our own end exists, so try that to tell them apart.
    if found is None and _ask(remote, local) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return found


def _ask(local: End, remote: End) -> Owner | None:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    addresses = b"".join(address.packed.ljust(16, b"\0") for address, _ in (local, remote))
    ends = _PORTS.pack(local[1], remote[1]) + addresses
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + ends + _ANY_SOCKET
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
        return _read(kernel.recv(4096), local, remote)


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
