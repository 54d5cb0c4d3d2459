"""Find the user at the other end of a connection from this machine (Linux only), and refuse other users: when the
daemon has ended, another user can take its port, and open pages then send the token there.

- The kernel forgets a closed socket, or reports it as root's in older versions. So a peer that cannot be found has gone
and is refused. Where the kernel does not answer, or not even about our own socket, the token has to do.
- A process of this machine may connect from any address of the machine, also to 127.0.0.1.
- The kernel is asked over netlink (sock_diag(7)). To read the list in /proc takes milliseconds: any client could block
the daemon that long by connecting.
"""

import contextlib
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
        lines: list[str] = []
        for path in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError):
                lines += Path(path).read_text().splitlines()[1:]
        return check_listed(lines, theirs, ours, os.getuid())


def _check_owner(owner: Owner | None, me: int) -> str | None:
    if owner is None or owner.inode == 0:
        return _GONE
    return None if owner.uid in (me, 0) else "this page belongs to another user"


def check_listed(lines: Iterable[str], peer: End, own: End, me: int) -> str | None:
    """Check the owner of the socket from `peer` to `own` in the lines of /proc/net/tcp."""
    theirs, ours = listed_names(*peer), listed_names(*own)
    is_complete = False  # whether our own socket is listed
    for _, local, remote, state, *others in map(str.split, lines):
        is_complete = is_complete or (state == "0A" and local.endswith(f":{own[1]:04X}"))
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
    ports, head = struct.pack("!HH", local[1], remote[1]), struct.Struct("=IHHII")
    # Sockets in all states, at any interface, with any cookie.
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    asked += ports + addresses + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    sock_diag, by_family, is_request, is_error = 4, 20, 1, 2  # numbers of linux/netlink.h and linux/sock_diag.h
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, sock_diag) as kernel:
        kernel.settimeout(1.0)
        kernel.send(head.pack(head.size + len(asked), by_family, is_request, 1, 0) + asked)
        answer = kernel.recv(4096)
    _, kind, *_ = head.unpack_from(answer)
    body = answer[head.size :]
    if kind == is_error:
        (negative,) = struct.unpack_from("=i", body)
        if negative == -errno.ENOENT:
            return None
        raise OSError(-negative, os.strerror(-negative))
    # Without such a socket the kernel may return one that listens on that port.
    if body[4:8] != ports:
        return None
    _, _, _, uid, inode = struct.unpack_from("=IIIII", body, 52)  # after expiry, receive queue and send queue
    return Owner(uid, inode)
