"""Connections without a token: how many there may be, and which one has to go for a new one."""

from gpuyard.daemon.server.connection import StrangerLimit, network_of


def test_the_oldest_connection_of_the_largest_network_goes_if_none_has_left() -> None:
    strangers = StrangerLimit[str](4)
    for name, network in (("owner", "10.0.0.1"), ("a", "10.0.0.2"), ("b", "10.0.0.2"), ("c", "10.0.0.2")):
        assert strangers.add(name, network) is None
    assert strangers.add("d", "10.0.0.2") == "a"
    assert strangers.add("e", "10.0.0.3") == "b"
    assert sorted(strangers) == ["c", "d", "e", "owner"]
    strangers = StrangerLimit[str](1)
    strangers.add("a", "10.0.0.1")
    strangers.discard("a")
    strangers.discard("a")
    assert strangers.add("b", "10.0.0.1") is None
    assert list(strangers) == ["b"]


def test_there_are_never_more_than_the_limit_and_the_newest_is_among_them() -> None:
    strangers = StrangerLimit[int](3)
    for number in range(50):
        strangers.add(number, f"10.0.0.{number}")
        assert len(strangers) <= 3
        assert number in strangers


def test_addresses_of_one_ipv6_network_count_together() -> None:
    assert network_of(("2001:db8::1", 5, 0, 0)) == network_of(("2001:db8::ffff:1", 6, 0, 0))
    assert network_of(("2001:db8:0:1::1", 5, 0, 0)) != network_of(("2001:db8::1", 5, 0, 0))
    assert network_of(("fe80::1%eth0", 5, 0, 2)) == "fe80::/64"
    assert network_of(("::ffff:10.0.0.1", 5, 0, 0)) == network_of(("10.0.0.1", 7)) == "10.0.0.1"
    assert network_of(None) == ""
