"""Moves what the processes of an attempt hold on devices to host memory, and back: all of them, or none.

Rules, from what the driver was seen to do:
- It answers for a process through a thread of that process. One that is stopped (SIGSTOP) leaves the asker waiting, so
  whoever is asked about is made to go on first, and what is suspended is stopped last.
- What was begun is finished by the process itself even if the asker dies. So every step asks how things stand and does
  what is left: a half-suspended tree can be suspended or resumed as any other.
- A process without a context on a device has nothing to move. It is stopped before the others are moved, so that it
  starts nothing meanwhile, and nobody is stopped who might hold one of the `mutexes`.
- Where two of the processes share memory with each other, they may share device memory too, and that can be taken away
  but not put back: nothing is tried.
- To put back what does not fit ruins the process for ever. So the room is looked at last of all.
"""

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from gpuyard.core.units import format_size
from gpuyard.engines.local import process_tree
from gpuyard.engines.local.process_tree import TrackedProcess

_MOST_ROUNDS = 50
_STOPS_WITHIN_S = 1.0
_MUTEX_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.002
_SHARED = re.compile(r"^\S+ ...s \S+ (\S+ \d+)\s+/(?:dev/shm/|memfd:|SYSV)", re.MULTILINE)


class CudaProcessState(IntEnum):
    """As the CUDA driver numbers them."""

    RUNNING = 0
    LOCKED = 1
    SUSPENDED = 2
    FAILED = 3


class DriverError(Exception):
    """The driver's refusal, in words."""


class Trouble(Exception):
    """Why it could not be; all is as it was before, unless it `is_ruined`."""

    def __init__(self, text: str, *, is_ruined: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_ruined = is_ruined


class Driver(Protocol):
    """What a vendor's driver does with one process. All but `state` raise a DriverError where it refuses."""

    def state(self, pid: int) -> CudaProcessState | None:
        """`None` where it has nothing on any device."""

    def lock(self, pid: int) -> None: ...

    def suspend(self, pid: int) -> None: ...

    def restore(self, pid: int) -> None: ...

    def unlock(self, pid: int) -> None: ...

    def free_mb(self, device_id: str) -> float: ...

    def held_mb(self, device_id: str, pids: Collection[int]) -> float:
        """What these hold on it, as far as it tells."""


class MemoryMover:
    """One use for one attempt. `find` lists its processes, `check` raises Trouble where it shall go no further."""

    def __init__(
        self,
        driver: Driver,
        find: Callable[[], Sequence[TrackedProcess]],
        *,
        devices: Sequence[str] = (),
        mutexes: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._find = find
        self.held_mb = dict.fromkeys(devices, 0.0)
        self._mutexes = mutexes
        self._check = check
        self._is_undoing = False
        self._known: dict[tuple[int, float], TrackedProcess] = {}
        self._states: dict[TrackedProcess, CudaProcessState] = {}

    def suspend(self) -> None:
        try:
            self._take_away()
        except Trouble as trouble:
            if not trouble.is_ruined:
                self.put_back()
            raise

    def resume(self, needs_mb: Mapping[str, float]) -> None:
        """What does not fit is left as it is."""
        found = self._find()
        if not found:
            raise _nobody()
        if not all(one.is_stopped for one in found):
            self._meet(found)
            if CudaProcessState.SUSPENDED not in self._states.values():
                self.put_back()
                return
            self.take_away()  # it was half put back: the room can be told only with all of it out of the way
        self._look_for_room(needs_mb)
        try:
            self._put_back()
        except Trouble as trouble:
            if not trouble.is_ruined:
                self.take_away()
            raise

    def put_back(self) -> None:
        """Whatever came of a suspension, undone."""
        self._is_undoing = True
        self._put_back()

    def take_away(self) -> None:
        """Whatever came of a resumption, undone."""
        self._is_undoing = True
        self._known.clear()
        self._states.clear()
        self._take_away()
        self._is_undoing = False

    # Away

    def _take_away(self) -> None:
        while self._lock_all():
            if not self._is_undoing:
                self._refuse_shared()
            self._weigh(self._those(CudaProcessState.LOCKED))
            for one in self._those(CudaProcessState.LOCKED):
                self._ask(one, self._driver.suspend, CudaProcessState.SUSPENDED, "be moved to host memory")
            self._stop(list(self._states))
        if not self._known:
            raise _nobody()

    def _lock_all(self) -> bool:
        """Whether there was anybody new; goes on until there is not."""
        is_anybody_new = False
        for _ in range(_MOST_ROUNDS):
            fresh = [one for one in self._find() if (one.pid, one.started) not in self._known]
            if not fresh:
                break
            is_anybody_new = True
            self._meet(fresh)
            self._stop([one for one in fresh if one not in self._states])
            for one in self._those(CudaProcessState.RUNNING):
                self._ask(one, self._driver.lock, CudaProcessState.LOCKED, "be made to pause")
        return is_anybody_new

    def _weigh(self, processes: Sequence[TrackedProcess]) -> None:
        """They pause, so what they hold now is what has to fit when they are put back."""
        pids = {one.pid for one in processes}
        for device_id in self.held_mb:
            with contextlib.suppress(DriverError):
                self.held_mb[device_id] += self._driver.held_mb(device_id, pids)

    def _refuse_shared(self) -> None:
        seen: dict[str, TrackedProcess] = {}
        for one in self._states:
            for segment in _shared_memory(one.pid):
                other = seen.setdefault(segment, one)
                if other is not one:
                    raise Trouble(
                        f"the processes {other.pid} and {one.pid} share memory, and perhaps device memory, which the"
                        " driver cannot put back"
                    )

    # Back

    def _look_for_room(self, needs_mb: Mapping[str, float]) -> None:
        for device_id, need_mb in needs_mb.items():
            try:
                free_mb = self._driver.free_mb(device_id)
            except DriverError as error:
                raise Trouble(f"{device_id} cannot be read: {error}") from None
            if free_mb < need_mb:
                raise Trouble(
                    f"no room on {device_id}: {format_size(need_mb)} are needed, {format_size(free_mb)} are free"
                )

    def _put_back(self) -> None:
        self._known.clear()
        self._states.clear()
        self._meet(self._find())
        for one in self._those(CudaProcessState.SUSPENDED):
            self._ask(one, self._driver.restore, CudaProcessState.LOCKED, "be put back", is_fatal=True)
        for one in self._those(CudaProcessState.LOCKED):
            self._ask(one, self._driver.unlock, CudaProcessState.RUNNING, "be let go on", is_fatal=True)

    # Each process

    def _those(self, state: CudaProcessState) -> list[TrackedProcess]:
        return [one for one, stands in self._states.items() if stands is state]

    def _meet(self, processes: Sequence[TrackedProcess]) -> None:
        """Asks how they stand, awake."""
        for one in processes:
            process_tree.send(one, signal.SIGCONT)
        for one in processes:
            self._known[one.pid, one.started] = one
            state = self._state(one)
            if state is CudaProcessState.FAILED:
                raise self._ruin(f"process {one.pid} has failed in the driver")
            if state is not None:
                self._states[one] = state

    def _state(self, one: TrackedProcess) -> CudaProcessState | None:
        try:
            return self._driver.state(one.pid)
        except DriverError as error:
            if self._is_undoing or process_tree.look_again(one) is None:
                return None
            raise Trouble(f"process {one.pid} cannot be asked for: {error}") from None

    def _ask(
        self,
        one: TrackedProcess,
        act: Callable[[int], None],
        then: CudaProcessState,
        what: str,
        *,
        is_fatal: bool = False,
    ) -> None:
        if not self._is_undoing:
            self._check()
        try:
            if process_tree.look_again(one) is not None:
                act(one.pid)
        except DriverError as error:
            text = f"process {one.pid} could not {what}: {error}"
            if process_tree.look_again(one) is not None:
                raise (self._ruin(text) if is_fatal else Trouble(text)) from None
        self._states[one] = then

    def _ruin(self, text: str) -> Trouble:
        """All of it is awake, so that it can be ended as any other."""
        for one in self._known.values():
            process_tree.send(one, signal.SIGCONT)
        return Trouble(text, is_ruined=True)

    def _stop(self, processes: Sequence[TrackedProcess]) -> None:
        with self._nobody_holds():
            waited_for = [one for one in processes if process_tree.send(one, signal.SIGSTOP)]
            deadline = time.monotonic() + _STOPS_WITHIN_S
            while time.monotonic() < deadline:
                waited_for = [now for one in waited_for if (now := process_tree.look_again(one)) and not now.is_stopped]
                if not waited_for:
                    break
                time.sleep(_LOOK_AGAIN_S)

    @contextlib.contextmanager
    def _nobody_holds(self) -> Iterator[None]:
        """A mutex that a stopped process holds would stop everybody else who needs it."""
        with contextlib.ExitStack() as held:
            for path in self._mutexes:
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    held.callback(os.close, descriptor)
                    _lock(descriptor, path)
            yield


def _nobody() -> Trouble:
    return Trouble("none of its processes is there: it may just have ended")


def _lock(descriptor: int, path: str) -> None:
    deadline = time.monotonic() + _MUTEX_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Trouble(f"{path} was held by somebody for {_MUTEX_WITHIN_S:g} s") from None
            time.sleep(_LOOK_AGAIN_S)
        else:
            return


def _shared_memory(pid: int) -> set[str]:
    """The segments that it could share with others, by device and inode."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return set(_SHARED.findall(file.read()))
    except OSError:
        return set()
