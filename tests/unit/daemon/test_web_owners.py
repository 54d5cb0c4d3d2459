"""Whose a socket is, as the kernel tells."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest

from gpuyard.daemon.web.peer_user import refuse_other_users
from gpuyard.daemon.web.socket_owner import End, find_owner
from tests.in_time import in_time

pytestmark = pytest.mark.linux("the kernel tells whose a socket is")


def end_of(told: tuple[str, int]) -> End:
    return ipaddress.ip_address(told[0]), told[1]


@contextlib.contextmanager
def connected(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The caller's end, and ours."""
    with socket.socket(family) as listening, socket.socket(family) as caller:
        listening.bind((address, 0))
        listening.listen()
        caller.connect(listening.getsockname())
        ours, _ = in_time(10.0, listening.accept)
        with ours:
            yield caller, ours


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0")]
)
def test_a_socket_is_its_owners_until_it_is_closed(family: socket.AddressFamily, address: str) -> None:
    with connected(family, address) as (caller, ours):
        theirs, own = end_of(caller.getsockname()[:2]), end_of(ours.getsockname()[:2])
        owner = find_owner(theirs, own)
        assert owner is not None
        assert (owner.uid, owner.inode) == (os.getuid(), os.fstat(caller.fileno()).st_ino)
        assert refuse_other_users(ours) is None
        caller.close()
        gone = find_owner(theirs, own)
        assert gone is None or gone.inode == 0
        assert refuse_other_users(ours) == "whoever asked has gone"


def test_who_listens_at_that_port_is_not_taken_for_who_asked() -> None:
    with connected(socket.AF_INET, "127.0.0.1") as (_, ours), socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="not implemented"):
            find_owner(end_of(other.getsockname()), end_of(ours.getsockname()))


def test_where_the_kernel_does_not_know_our_own_end_it_cannot_be_asked() -> None:
    nowhere = (ipaddress.ip_address("127.0.0.1"), 1)
    with pytest.raises(OSError, match="not implemented"):
        find_owner(nowhere, (nowhere[0], 2))
