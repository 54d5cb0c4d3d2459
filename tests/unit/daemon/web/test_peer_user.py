"""The user at the other end of a connection, from the kernel or from its list of sockets."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest

from gpuyard.daemon.web.peer_user import (
    End,
    check_listed,
    find_owner,
    is_local,
    listed_names,
    plain,
    refuse_other_users,
)
from tests.in_time import in_time

LINUX = pytest.mark.linux("the kernel reports the user of a socket")


def end_of(name: tuple[str, int]) -> End:
    return ipaddress.ip_address(name[0]), name[1]


@contextlib.contextmanager
def connected(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the client's end and ours."""
    with socket.socket(family) as listening, socket.socket(family) as client:
        listening.bind((address, 0))
        listening.listen()
        client.connect(listening.getsockname())
        ours, _ = in_time(10.0, listening.accept)
        with ours:
            yield client, ours


@LINUX
@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0")]
)
def test_the_owner_of_a_socket_is_known_until_it_is_closed(family: socket.AddressFamily, address: str) -> None:
    with connected(family, address) as (client, ours):
        theirs, own = end_of(client.getsockname()[:2]), end_of(ours.getsockname()[:2])
        owner = find_owner(theirs, own)
        assert owner is not None
        assert (owner.uid, owner.inode) == (os.getuid(), os.fstat(client.fileno()).st_ino)
        assert refuse_other_users(ours) is None
        client.close()
        gone = find_owner(theirs, own)
        assert gone is None or gone.inode == 0
        assert refuse_other_users(ours) == "the client has closed the connection"


@LINUX
def test_a_listener_or_an_unknown_own_end_is_not_taken_for_the_client() -> None:
    with connected(socket.AF_INET, "127.0.0.1") as (_, ours), socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="not implemented"):
            find_owner(end_of(other.getsockname()), end_of(ours.getsockname()))
    nowhere = (ipaddress.ip_address("127.0.0.1"), 1)
    with pytest.raises(OSError, match="not implemented"):
        find_owner(nowhere, (nowhere[0], 2))


LISTENING = (
    "   0: 0100007F:223D 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 17 1 0 100 0 0 10 0"
)
PEER, OWN = (plain("127.0.0.1"), 0xC001), (plain("127.0.0.1"), 8765)


def row(uid: int = 1000, inode: int = 99, state: str = "01", local: str = "0100007F:C001") -> str:
    return f"   1: {local} 0100007F:223D {state} 00000000:00000000 00:00000000 00000000  {uid}        0 {inode} 1 0 20"


@pytest.mark.parametrize(
    ("lines", "is_accepted"),
    [
        ([LISTENING, row()], True),
        ([LISTENING, row(uid=0)], True),
        ([LISTENING, row(uid=1001)], False),
        ([row(uid=1001), LISTENING], False),
        ([LISTENING, row(uid=0, inode=0, state="06")], False),  # closed: the kernel no longer reports the user
        ([LISTENING], False),
        ([LISTENING, row(local="0100007F:C002")], False),
        ([LISTENING, row(uid=1001, local="0100007F:C002"), row()], True),
        ([], True),  # no list at all
    ],
)
def test_on_this_machine_only_the_user_and_root_are_accepted(lines: list[str], is_accepted: bool) -> None:
    assert (check_listed(lines, PEER, OWN, 1000) is None) is is_accepted


def test_a_dual_stack_socket_is_found_by_either_form_of_its_address() -> None:
    mapped = "0000000000000000FFFF00000100007F"
    line = f"   1: {mapped}:C001 {mapped}:223D 01 00000000:00000000 00:00000000 00000000  1001        0 99 1 0 20"
    assert check_listed([LISTENING, line], PEER, OWN, 1000) == "this page belongs to another user"
    assert plain("::ffff:127.0.0.1") == ipaddress.ip_address("127.0.0.1")
    assert listed_names(plain("::1"), 8765) == {"00000000000000000000000001000000:223D"}


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True), ("::1", "::1", True), ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("10.0.0.4", "10.0.0.4", True), ("10.0.0.5", "127.0.0.1", True), ("10.0.0.5", "10.0.0.4", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)  # fmt: skip
def test_a_connection_from_this_machine_is_recognised(peer: str, own: str, expected: bool) -> None:
    assert is_local(plain(peer), plain(own)) is expected
