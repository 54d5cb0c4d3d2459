"""A signal handler of a program may raise an exception in `point` while the program's memory is parked. Whatever saves
tensors then must not find empty ones.

Not a unit test, as these run with coverage: an exception amid its code would leave its lock held."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import FrameType

import pytest

from gpuyard.engines.suspend.ask_to_park import RegisteredProcesses
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system import user_sockets
from gpuyard.system.parking_protocol import Registration, path_of, registered
from tests.integration.queue_fixture import until

DEADLINE_S = 30.0


class Memory(Enum):
    ON_GPU = 1
    PARKED = 2  # the tensors are empty
    IN_RAM = 3


class Stop(Exception):
    """What the program's signal handler raises."""


class Program:
    """`while_moving` and `while_saved` are called within its functions, where a signal may come too."""

    def __init__(self, queue: Path) -> None:
        self.registration = Registration(path_of(str(queue), "1.1", 1, 1), 1, 1)
        self.memory = Memory.ON_GPU
        self.is_stepping = threading.Event()
        self.while_moving: Callable[[], object] = lambda: None
        self.while_saved: Callable[[], object] = lambda: None
        self.listener = ParkListener(self.registration.path, self._park, self._bring_back, self._stay_in_ram)

    def _park(self) -> int:
        self.memory = Memory.PARKED
        self.while_moving()
        return 5

    def _bring_back(self) -> None:
        self.while_moving()
        self.memory = Memory.ON_GPU

    def _stay_in_ram(self) -> bool:
        self.while_saved()
        if self.memory is not Memory.PARKED:
            return False
        self.memory = Memory.IN_RAM
        return True

    def ask(self) -> RegisteredProcesses:
        return RegisteredProcesses([self.registration], DEADLINE_S)

    def step_until_stopped(self) -> None:
        """Work until the signal handler raises Stop. Fails if something else, or nothing, ends it."""
        with pytest.raises(Stop):
            self._step_for_ever()

    def _step_for_ever(self) -> None:
        self.is_stepping.set()
        while True:
            self.listener.point()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


def stop(_: int, __: FrameType | None) -> None:
    raise Stop


def send_signal() -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGUSR1)


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """Do what another process does meanwhile."""
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_program_that_is_interrupted_while_parked_has_its_memory_in_ram(program: Program, tmp_path: Path) -> None:
    answers: list[int | None] = []

    def park_and_stop() -> None:
        answers.append(program.ask().park())
        send_signal()

    with in_thread(park_and_stop):
        program.step_until_stopped()
    assert answers == [5]
    assert program.memory is Memory.IN_RAM
    assert registered(str(tmp_path), "1.1") == [], "it has nothing left to park"
    program.listener.point()  # no longer waits


def test_a_second_signal_does_not_leave_it_with_empty_tensors(program: Program) -> None:
    def stop_once_more() -> None:
        program.while_saved = lambda: None
        signal.raise_signal(signal.SIGUSR1)

    def park_and_stop() -> None:
        program.ask().park()
        program.while_saved = stop_once_more
        send_signal()

    with in_thread(park_and_stop):
        program.step_until_stopped()
    assert program.memory is Memory.IN_RAM


def test_a_signal_amid_the_move_leaves_the_memory_in_ram(program: Program) -> None:
    answers: list[object] = []

    def park() -> None:
        processes = program.ask()
        answers.extend((processes.park(), processes.refusal))

    program.while_moving = lambda: signal.raise_signal(signal.SIGUSR1)
    with in_thread(park):
        program.step_until_stopped()
    assert program.memory is Memory.IN_RAM
    assert answers[0] is None


def test_a_signal_while_the_memory_comes_back_leaves_it_in_ram(program: Program) -> None:
    answers: list[str | None] = []

    def park_and_return() -> None:
        program.ask().park()
        program.while_moving = lambda: signal.raise_signal(signal.SIGUSR1)
        answers.append(program.ask().bring_back())

    with in_thread(park_and_return):
        program.step_until_stopped()
    assert program.memory is Memory.IN_RAM
    assert answers == [None], "the program goes on, so its job is resumed"


def test_it_answers_at_once_when_it_has_left_its_point(program: Program) -> None:
    answers: list[bytes] = []

    def park_and_stop() -> None:
        program.ask().park()
        with contextlib.closing(user_sockets.connect(program.registration.path, DEADLINE_S)) as connection:
            for request in (b"hold\n", b"return\n", b"park 99\n"):
                if request == b"return\n":
                    send_signal()
                    is_over.wait(DEADLINE_S)
                connection.send(request)
                answers.append(connection.recv(4096))

    is_over = threading.Event()
    with in_thread(park_and_stop):
        program.step_until_stopped()
        is_over.set()
    assert answers[1:] == [b"returned\n", b"refused a signal ended its step while its memory was parked\n"]


def test_a_signal_while_it_is_held_takes_nothing_away(program: Program, tmp_path: Path) -> None:
    def hold_and_stop() -> None:
        with contextlib.closing(user_sockets.connect(program.registration.path, DEADLINE_S)) as connection:
            connection.send(b"hold\n")
            connection.recv(4096)
            program.is_stepping.wait(DEADLINE_S)
            send_signal()
            has_stopped.wait(DEADLINE_S)

    has_stopped, is_over = threading.Event(), threading.Event()
    with in_thread(hold_and_stop):
        program.step_until_stopped()
        has_stopped.set()
    assert program.memory is Memory.ON_GPU

    def park_and_return() -> None:
        try:
            until(lambda: program.ask().park() == 5, "the end of what held it")
            assert program.ask().bring_back() is None
        finally:
            is_over.set()

    with in_thread(park_and_return):
        while not is_over.is_set():
            program.listener.point()
    assert program.memory is Memory.ON_GPU
    program.listener.close()
