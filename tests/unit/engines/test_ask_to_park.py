"""Processes that wait for each other in each step park together, or not at all, whatever happens in between. Here they
are threads with a barrier; `tests/integration/test_park_ranks.py` has processes."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.engines.suspend.ask_to_park import NotDone, RegisteredProcesses, agree_on_points
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system import user_sockets
from gpuyard.system.parking_protocol import Registration, path_of, registered, why_incomplete

DEADLINE_S = 30.0
BYTES = 5


class Ranks:
    """Two ranks. `steps` is the last step of each, `parked` the steps after which they have parked."""

    def __init__(self, folder: Path) -> None:
        paths = [path_of(str(folder), "1.1", number, 2) for number in range(2)]
        self.registrations = [Registration(path, number, 2) for number, path in enumerate(paths)]
        self.steps, self.parked, self.returned = [0, 0], [[], []], [0, 0]  # type: tuple[list[int], list[list[int]], list[int]]
        self.refuses = False
        self._last_step = 1 << 40
        self._is_over = threading.Event()
        self._barrier = threading.Barrier(2)
        self._listeners = [ParkListener(path, *self._moves(rank)) for rank, path in enumerate(paths)]
        self._threads = [threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in range(2)]

    def _moves(self, rank: int) -> tuple[Callable[[], int], Callable[[], None]]:
        def park() -> int:
            if rank and self.refuses:
                raise RuntimeError("no RAM")
            self.parked[rank].append(self.steps[rank])
            return BYTES

        def bring_back() -> None:
            if rank and self.refuses:
                raise RuntimeError("no memory")
            self.returned[rank] += 1

        return park, bring_back

    def _work(self, rank: int) -> None:
        while self.steps[rank] < self._last_step:
            if rank == 0 and self._is_over.is_set():
                self._last_step = self.steps[rank] + 1
            self._barrier.wait(DEADLINE_S)
            self.steps[rank] += 1
            self._listeners[rank].point()

    def start(self) -> RegisteredProcesses:
        for thread in self._threads:
            thread.start()
        return self.asked(self.registrations)

    def asked(self, registrations: list[Registration]) -> RegisteredProcesses:
        return RegisteredProcesses(registrations, DEADLINE_S)

    def end(self) -> None:
        """Let the ranks end after the same step; fails if one of them waits for another."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), f"a rank hangs: {self.steps}"
        assert self.steps[0] == self.steps[1]


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def ranks(queue: Path) -> Ranks:
    return Ranks(queue)


@contextlib.contextmanager
def connected(registration: Registration) -> Iterator[Callable[[str], str]]:
    """A connection on which requests are made one by one, as a helper does that is killed at some point."""
    connection = user_sockets.connect(registration.path, DEADLINE_S)

    def ask(request: str) -> str:
        connection.send(f"{request}\n".encode())
        return connection.recv(4096).decode().strip()

    yield ask
    connection.close()


def park_only(registration: Registration) -> None:
    """Let one of the processes park, and keep that."""
    with connected(registration) as ask:
        number = ask("hold").removeprefix("next ")
        assert ask(f"park {number}") == f"parked {BYTES}"
        keep(ask)


def keep(ask: Callable[[str], str]) -> None:
    # It is not answered, but what follows is refused once it was read.
    assert ask("keep\nhold") == ""


def test_ranks_park_after_the_same_step_and_go_on_together_however_often_they_are_asked(ranks: Ranks) -> None:
    processes = ranks.start()
    for _ in range(20):
        assert processes.park() == 2 * BYTES
        assert ranks.steps[0] == ranks.steps[1]
        assert processes.bring_back() is None
    assert ranks.parked[0] == ranks.parked[1]
    assert len(ranks.parked[0]) == 20
    assert processes.park() == processes.park() == 2 * BYTES
    assert [len(steps) for steps in ranks.parked] == [21, 21]
    assert processes.bring_back() is None
    ranks.end()


def test_no_rank_parks_if_one_refuses(ranks: Ranks) -> None:
    processes = ranks.start()
    ranks.refuses = True
    assert processes.park() is None
    assert processes.refusal == "no RAM"
    ranks.end()
    assert len(ranks.parked[0]) == ranks.returned[0]


def test_all_ranks_stay_parked_if_one_cannot_take_its_memory_back(ranks: Ranks) -> None:
    processes = ranks.start()
    assert processes.park() == 2 * BYTES
    ranks.refuses = True
    assert processes.bring_back() == "no memory"
    assert processes.park() == 2 * BYTES, "the first may have been back, and parks again at the same point"
    assert set(ranks.parked[0]) == set(ranks.parked[1])
    ranks.refuses = False
    assert processes.bring_back() is None
    ranks.end()


def test_ranks_meet_at_a_later_point_if_only_one_was_left_parked(ranks: Ranks) -> None:
    """As a helper that is killed between two processes leaves them."""
    processes = ranks.start()
    park_only(ranks.registrations[0])
    assert processes.park() == 2 * BYTES
    assert ranks.parked[0][-1] == ranks.parked[1][-1]
    with connected(ranks.registrations[1]) as ask:  # the other way round: only one was told to go on
        assert ask("return") == "returned"
        keep(ask)
    assert processes.park() == 2 * BYTES
    assert ranks.parked[0][-1] == ranks.parked[1][-1]
    assert processes.bring_back() is None
    ranks.end()


@pytest.mark.parametrize(
    "requests", [("hold",), ("hold", "park 10000000000"), ("what",), ("park 0",), ("park x",), ("return",)]
)
def test_a_closed_connection_lets_the_ranks_go_on(ranks: Ranks, requests: tuple[str, ...]) -> None:
    ranks.start()
    connection = user_sockets.connect(ranks.registrations[0].path, DEADLINE_S)
    for request in requests:
        connection.send(f"{request}\n".encode())
        if not request.startswith("park 1"):
            connection.recv(4096)
    connection.close()
    ranks.end()
    assert ranks.parked == [[], []]


@pytest.mark.parametrize("answers", [(), ("next 3",), ("next many",), ("next 3", "parked much")])
def test_a_process_that_ends_or_answers_nonsense_lets_the_others_go_on(queue: Path, answers: tuple[str, ...]) -> None:
    (queue / "suspending").mkdir(mode=0o700)
    path = path_of(str(queue), "1.1", 7, 1)
    with user_sockets.bind(path) as listening:
        listening.listen()
        thread = threading.Thread(target=answer_with, args=(listening, answers))
        thread.start()
        other = Independent(queue)
        processes = RegisteredProcesses([Registration(path, 7, 1), other.registration], DEADLINE_S)
        assert processes.park() is None
        assert processes.refusal
        thread.join(DEADLINE_S)
    other.end()


class Independent:
    """A process that waits for no other, and counts its points."""

    def __init__(self, queue: Path) -> None:
        self.registration = Registration(path_of(str(queue), "1.1", 8, 1), 8, 1)
        self.is_parked, self._is_over = False, threading.Event()
        self._listener = ParkListener(self.registration.path, self._park, self._bring_back)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _park(self) -> int:
        self.is_parked = True
        return BYTES

    def _bring_back(self) -> None:
        self.is_parked = False

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._listener.point()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert not self.is_parked


def answer_with(listening: socket.socket, answers: tuple[str, ...]) -> None:
    """Answer the requests of the first connection, and close it and all that follow."""
    connection, _ = listening.accept()
    with connection:
        for answer in answers:
            connection.recv(4096)
            connection.send(f"{answer}\n".encode())
        connection.recv(4096)
    listening.accept()[0].close()


def test_processes_that_wait_for_no_other_park_wherever_they_are(queue: Path, ranks: Ranks) -> None:
    """Also beside others that do."""
    ranks.start()
    alone = Independent(queue)
    processes = ranks.asked([*ranks.registrations, alone.registration])
    assert processes.park() == 3 * BYTES
    assert alone.is_parked
    assert processes.bring_back() is None
    alone.end()
    ranks.end()


def registration(pid: int, world_size: int) -> Registration:
    return Registration("", pid, world_size)


@pytest.mark.parametrize(
    ("following", "agreed"),
    [
        ({(1, 1): 7}, [7]), ({(1, 1): 7, (2, 1): 90000}, [7, 90000]), ({(1, 2): 7, (2, 2): 8}, [8, 8]),
        ({(1, 2): 7, (2, 2): 7}, [7, 7]), ({(1, 2): 7, (2, 2): 11, (3, 1): 2}, [11, 11, 2]),
    ],
)  # fmt: skip
def test_processes_agree_on_the_largest_of_their_next_points(
    following: dict[tuple[int, int], int], agreed: list[int]
) -> None:
    points = agree_on_points({registration(*each): number for each, number in following.items()})
    assert list(points.values()) == agreed


def test_processes_that_are_far_apart_do_not_count_the_same_steps() -> None:
    with pytest.raises(NotDone, match="5 steps apart"):
        agree_on_points({registration(1, 2): 7, registration(2, 2): 12})


@pytest.mark.parametrize(
    ("sizes", "are_complete"),
    [([], True), ([1], True), ([1, 1, 1], True), ([2, 2], True), ([2, 1, 2], True), ([2], False), ([4, 4], False),
     ([2, 2, 2, 2], False), ([2, 3], False)],
)  # fmt: skip
def test_all_that_wait_for_each_other_have_to_register(sizes: list[int], *, are_complete: bool) -> None:
    assert (why_incomplete([registration(*each) for each in enumerate(sizes)]) is None) is are_complete


def test_names_that_are_no_registrations_are_ignored(queue: Path) -> None:
    (queue / "suspending").mkdir()
    for name in (
        "1.1.park",
        "1.1.1.park",
        "1.1.1.x.park",
        "1.1.1.1.lock",
        "1.1.lock",
        "1.1.1.1.1.park",
        "2.1.1.1.park",
    ):
        (queue / "suspending" / name).touch()
    assert registered(str(queue), "1.1") == []
    assert [(each.pid, each.world_size) for each in registered(str(queue), "2.1")] == [(1, 1)]
