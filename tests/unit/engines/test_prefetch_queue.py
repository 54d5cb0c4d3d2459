"""The prefetch queue: each launch is taken once, by the keeper or by the daemon."""

import os
from collections.abc import Iterator

import pytest

from gpuyard.engines.local.prefetch_queue import KeeperPrefetchQueue, PrefetchQueue


@pytest.fixture
def queue() -> Iterator[PrefetchQueue]:
    queue = PrefetchQueue()
    yield queue
    queue.close()


@pytest.fixture
def keeper(queue: PrefetchQueue) -> Iterator[KeeperPrefetchQueue]:
    keeper = KeeperPrefetchQueue(os.dup(queue.taking.fileno()))
    yield keeper
    keeper.close()


def test_the_keeper_takes_launches_of_its_group_in_order(queue: PrefetchQueue, keeper: KeeperPrefetchQueue) -> None:
    assert queue.put(7, b"first")
    assert queue.put(7, b"second")
    assert [keeper.take(7), keeper.take(7), keeper.take(7)] == [b"first", b"second", None]


def test_a_launch_of_another_group_stays_in_the_queue(queue: PrefetchQueue, keeper: KeeperPrefetchQueue) -> None:
    queue.put(8, b"other")
    assert keeper.take(7) is None
    assert keeper.take(0) is None
    assert queue.take_back() == [b"other"]


def test_what_is_taken_back_is_not_taken_again(queue: PrefetchQueue, keeper: KeeperPrefetchQueue) -> None:
    for content in (b"a", b"b", b"c"):
        queue.put(7, content)
    assert keeper.take(7) == b"a"
    assert queue.take_back(1) == [b"b"]
    assert queue.take_back() == [b"c"]
    assert keeper.take(7) is None


def test_the_keeper_notices_the_death_of_the_daemon_before_it_has_taken_everything(
    queue: PrefetchQueue, keeper: KeeperPrefetchQueue
) -> None:
    queue.put(7, b"left behind")
    assert keeper.has_daemon()
    queue.close()
    assert not keeper.has_daemon()


def test_a_full_queue_takes_no_more_and_keeps_what_it_has(queue: PrefetchQueue) -> None:
    put = 0
    while queue.put(7, bytes(4096)):
        put += 1
    assert len(queue.take_back()) == put > 0


def test_a_closed_queue_gives_nothing(queue: PrefetchQueue, keeper: KeeperPrefetchQueue) -> None:
    queue.put(7, b"first")
    keeper.close()
    assert keeper.take(7) is None
    assert not keeper.has_daemon()


def test_without_such_sockets_there_is_nothing_to_take() -> None:
    keeper = KeeperPrefetchQueue(os.open(os.devnull, os.O_RDWR))
    assert keeper.take(7) is None
    assert not keeper.has_daemon()
