"""The shelf: each launch is taken once, by the keeper or by the daemon."""

import os
from collections.abc import Iterator

import pytest

from gpuyard.engines.local.shelf import KeeperShelf, Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@pytest.fixture
def keeper(shelf: Shelf) -> Iterator[KeeperShelf]:
    keeper = KeeperShelf(os.dup(shelf.taking.fileno()))
    yield keeper
    keeper.close()


def test_the_keeper_takes_launches_of_its_group_in_order(shelf: Shelf, keeper: KeeperShelf) -> None:
    assert shelf.put(7, b"first")
    assert shelf.put(7, b"second")
    assert [keeper.take(7), keeper.take(7), keeper.take(7)] == [b"first", b"second", None]


def test_a_launch_of_another_group_stays_on_the_shelf(shelf: Shelf, keeper: KeeperShelf) -> None:
    shelf.put(8, b"other")
    assert keeper.take(7) is None
    assert keeper.take(0) is None
    assert shelf.take_back() == [b"other"]


def test_what_is_taken_back_is_not_taken_again(shelf: Shelf, keeper: KeeperShelf) -> None:
    for content in (b"a", b"b", b"c"):
        shelf.put(7, content)
    assert keeper.take(7) == b"a"
    assert shelf.take_back(1) == [b"b"]
    assert shelf.take_back() == [b"c"]
    assert keeper.take(7) is None


def test_the_keeper_notices_the_death_of_the_daemon_before_it_has_taken_everything(
    shelf: Shelf, keeper: KeeperShelf
) -> None:
    shelf.put(7, b"left behind")
    assert keeper.has_daemon()
    shelf.close()
    assert not keeper.has_daemon()


def test_a_full_shelf_takes_no_more_and_keeps_what_it_has(shelf: Shelf) -> None:
    put = 0
    while shelf.put(7, bytes(4096)):
        put += 1
    assert len(shelf.take_back()) == put > 0


def test_a_closed_shelf_gives_nothing(shelf: Shelf, keeper: KeeperShelf) -> None:
    shelf.put(7, b"first")
    keeper.close()
    assert keeper.take(7) is None
    assert not keeper.has_daemon()


def test_without_such_sockets_there_is_nothing_to_take() -> None:
    keeper = KeeperShelf(os.open(os.devnull, os.O_RDWR))
    assert keeper.take(7) is None
    assert not keeper.has_daemon()
