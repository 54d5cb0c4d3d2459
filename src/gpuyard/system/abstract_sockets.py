"""Unix sockets with abstract names that listen on this machine (Linux), as the kernel reports them to `ss`.

Nothing is connected to: the kernel itself names the user of each. Sockets of other network namespaces, as in most
containers, are not among them.
"""

import socket
import struct
import sys
from collections.abc import Iterator

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_LISTENING = 1 << 10
_SHOW_NAME, _SHOW_UID = 0x01, 0x40
_NAME, _UID = 0, 7
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, pid
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_BEFORE_ATTRIBUTES = _HEADER.size + 16
_QUERY = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _LISTENING, 0, _SHOW_NAME | _SHOW_UID, 0, 0)
_BUFFER = 1 << 16
_TIMEOUT_S = 1.0
# Any user can open thousands.
_MAX_READ = 8 << 20


def listening_sockets() -> Iterator[tuple[bytes, int]]:
    """Yield the names of listening abstract sockets, each with its user. Raises OSError if the kernel does not say."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(_QUERY), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0) + _QUERY)
        read = 0
        while read < _MAX_READ:
            replies = kernel.recv(_BUFFER)
            read += len(replies)
            while replies:
                length, kind, *_ = _HEADER.unpack_from(replies)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (error,) = struct.unpack_from("=i", replies, _HEADER.size)
                    raise OSError(-error, "the kernel does not list unix sockets")
                found = dict(_attributes(replies[_BEFORE_ATTRIBUTES:length]))
                name, uid = found.get(_NAME, b""), found.get(_UID)
                if name.startswith(b"\0") and uid is not None:
                    yield name[1:], int.from_bytes(uid, sys.byteorder)
                replies = replies[_aligned(length) :]


def _attributes(text: bytes) -> Iterator[tuple[int, bytes]]:
    while len(text) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(text)
        yield kind, text[_ATTRIBUTE.size : length]
        text = text[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
