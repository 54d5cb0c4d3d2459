"""Moves the device memory of an attempt's processes to host memory, and back: of all processes, or of none.

Rules, from how the driver behaves:
- It answers for a process through a thread of that process. A stopped process (SIGSTOP) blocks the caller. So processes
  are continued before the driver is asked about them, and stopped after they are suspended.
- The process itself finishes a step that was started, even if the caller dies. So every step asks for the state first
  and does what is left: a half-suspended tree can be suspended or resumed like any other.
- A process without a context on a device has nothing to move. It is stopped before the others are moved, so that it
  starts nothing meanwhile. No process is stopped while it may hold one of the `mutexes`.
- Two processes that share memory may share device memory too, which the driver can take away but not put back. Then
  nothing is tried.
- Putting back more than fits destroys the process. So free memory is checked last of all.
- A program that can park its memory itself (`ask_to_park.py`) is asked first, while all of its processes still run: it
  is faster, and leaves little to the driver. Then the attempt counts as suspended; the driver moves the rest, if it
  can. The program takes its memory back last."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.attempt_processes import TrackedProcess
from gpuyard.engines.suspend.ask_to_park import RegisteredProcesses
from gpuyard.engines.suspend.drivers import Cuda, CudaProcessState, DriverError, NoDriver, Simulated
from gpuyard.model.units import MB, format_size
from gpuyard.system.file_locks import lock_within

_MOST_ROUNDS = 50
_MOST_THREADS = 16
_NO_PROCESSES = "it has no processes: it may just have ended"
# Segments of memory that a process could share with others, by device and inode.
_SHARED = re.compile(r"^\S+ ...s \S+ (\S+ \d+)\s+/(?:dev/shm/|memfd:|SYSV)", re.MULTILINE)


Driver: TypeAlias = Cuda | Simulated | NoDriver


class _DriverCall(NamedTuple):
    """A call of the driver; `action` ends "process N could not …". After one that `is_fatal`, it can never continue."""

    call: str
    new_state: CudaProcessState
    action: str
    is_fatal: bool = False


_LOCK = _DriverCall("lock", CudaProcessState.LOCKED, "be paused")
_SUSPEND = _DriverCall("suspend", CudaProcessState.SUSPENDED, "be moved to host memory")
_RESTORE = _DriverCall("restore", CudaProcessState.LOCKED, "be put back", is_fatal=True)
_UNLOCK = _DriverCall("unlock", CudaProcessState.RUNNING, "be unlocked", is_fatal=True)


class Trouble(Exception):
    """Why a move failed. The attempt is as it was before, unless `is_ruined`: then it can never continue."""

    def __init__(self, text: str, *, is_ruined: bool = False) -> None:
        super().__init__(text)
        self.is_ruined = is_ruined


class MemoryMover:
    """Suspends or resumes one attempt, once. `find` lists its processes, `find_registered` returns those among them
    that can park their memory, if any; `check` raises Trouble to stop the move, and `tell_parked` is called when the
    program has parked nearly all of its memory."""

    def __init__(  # noqa: PLR0913 - the parts of the system that it works on
        self,
        driver: Driver,
        find: Callable[[], Sequence[TrackedProcess]],
        find_registered: Callable[[Sequence[TrackedProcess]], RegisteredProcesses | None],
        *,
        devices: Sequence[str],
        mutexes: Sequence[str],
        check: Callable[[], None],
        tell_parked: Callable[["MemoryMover"], object] = lambda _: None,
    ) -> None:
        self._driver, self._find, self._find_registered = driver, find, find_registered
        self.held_mb = dict.fromkeys(devices, 0.0)
        self.parked_mb: float | None = None  # what the program has moved itself
        self.not_parked = ""  # why it has not, though it has registered
        self._mutexes, self._check, self._tell_parked = mutexes, check, tell_parked
        self._is_parked = False
        self._is_undoing = False
        self._known: dict[tuple[int, float], TrackedProcess] = {}
        self._states: dict[TrackedProcess, CudaProcessState] = {}

    def suspend(self) -> None:
        try:
            self._take_away()
        except Trouble as trouble:
            if self._is_parked:
                self._stop(self._find())
                return
            if not trouble.is_ruined:
                self.undo_suspend()
            raise

    def resume(self, needs_mb: Mapping[str, float]) -> None:
        """Resume the attempt. Raises Trouble and leaves it suspended if `needs_mb` is not free on each device."""
        found = self._find()
        if not found:
            raise Trouble(_NO_PROCESSES)
        if self._driver.refusal is not None and self._find_registered(found) is None:
            raise Trouble(self._driver.refusal)  # a driver that was there when it was suspended is not there now
        if not all(process.is_stopped for process in found):
            self._read_states(found)
            if CudaProcessState.SUSPENDED not in self._states.values() and self._find_registered(found) is None:
                self.undo_suspend()
                return
            self.undo_resume()  # it was half put back: free memory is known only when all of it is away
        self._check_free_memory(needs_mb, {process.pid for process in found})
        try:
            self._put_back()
        except Trouble as trouble:
            if not trouble.is_ruined:
                self.undo_resume()
            raise

    def undo_suspend(self) -> None:
        """Put everything back, however far the suspension came."""
        self._is_undoing = True
        self._put_back()

    def undo_resume(self) -> None:
        """Take everything away, however far the resumption came."""
        self._is_undoing = True
        self._known.clear()
        self._states.clear()
        self._take_away()
        self._is_undoing = False

    def _take_away(self) -> None:
        self._park()
        if self._driver.refusal is not None and not self.parked_mb:
            why = self.not_parked or "it has not called gpuyard.torch.parkable"
            raise Trouble(f"{self._driver.refusal}; the program did not park its memory: {why}")
        while self._lock_all():
            if not self._is_undoing:
                self._refuse_shared_memory()
            locked = self._in_state(CudaProcessState.LOCKED)
            if self.parked_mb is None:  # it has to fit when they are put back
                self._add_held(locked)
            self._call_for_each(locked, _SUSPEND)
            self._stop(list(self._states))
        if not self._known:
            raise Trouble(_NO_PROCESSES)

    def _park(self) -> None:
        processes = self._find()
        program = self._find_registered(processes)
        if program is None:
            return
        self._add_held(processes)
        for process in processes:
            process_tree.send(process, signal.SIGCONT)
        parked_bytes = program.park()
        held_mb, self.held_mb = self.held_mb, dict.fromkeys(self.held_mb, 0.0)
        self.not_parked = program.refusal or ""
        if parked_bytes is None:
            return
        self.parked_mb = parked_bytes / MB
        self._add_held(processes)
        left_mb, self.held_mb = sum(self.held_mb.values()), held_mb
        if len(held_mb) == 1 and sum(held_mb.values()) < self.parked_mb:  # it had parked already, for an earlier helper
            self.held_mb = dict.fromkeys(held_mb, left_mb + self.parked_mb)
        # What each process may keep on its devices when it has parked its memory: its contexts.
        self._is_parked = left_mb <= 1024.0 * len(program)
        if self._is_parked and not self._is_undoing:
            self._tell_parked(self)

    def _add_held(self, processes: Sequence[TrackedProcess]) -> None:
        pids = {process.pid for process in processes}
        for device_id in self.held_mb:
            with contextlib.suppress(DriverError):
                self.held_mb[device_id] += self._driver.held_mb(device_id, pids)

    def _lock_all(self) -> bool:
        """Lock processes until no new ones appear. Return whether there were any new ones."""
        has_new = False
        for _ in range(_MOST_ROUNDS):
            new = [process for process in self._find() if (process.pid, process.started) not in self._known]
            if not new:
                break
            has_new = True
            self._read_states(new)
            self._stop([process for process in new if process not in self._states])
            for process in self._in_state(CudaProcessState.RUNNING):
                self._call_driver(process, _LOCK)
        return has_new

    def _refuse_shared_memory(self) -> None:
        seen: dict[str, TrackedProcess] = {}
        for process in self._states:
            try:
                with open(f"/proc/{process.pid}/maps", encoding="utf-8", errors="replace") as file:
                    segments = set(_SHARED.findall(file.read()))
            except OSError:
                continue
            for segment in segments:
                other = seen.setdefault(segment, process)
                if other is not process:
                    raise Trouble(
                        f"the processes {other.pid} and {process.pid} share memory, and perhaps device memory, which"
                        " the driver cannot put back"
                    )

    def _check_free_memory(self, needs_mb: Mapping[str, float], pids: Collection[int]) -> None:
        """Memory that the processes still hold need not be free, such as contexts that the driver could not move."""
        for device_id, need_mb in needs_mb.items():
            try:
                free_mb = self._driver.free_mb(device_id)
                if free_mb is None:
                    continue
                free_mb += self._driver.held_mb(device_id, pids)
            except DriverError as error:
                raise Trouble(f"{device_id} cannot be read: {error}") from None
            if free_mb < need_mb:
                raise Trouble(
                    f"not enough memory on {device_id}: {format_size(need_mb)} needed, {format_size(free_mb)} free"
                )

    def _put_back(self) -> None:
        self._known.clear()
        self._states.clear()
        self._read_states(self._find())
        self._call_for_each(self._in_state(CudaProcessState.SUSPENDED), _RESTORE)
        for process in self._in_state(CudaProcessState.LOCKED):
            self._call_driver(process, _UNLOCK)
        program = self._find_registered(list(self._known.values()))
        if program is not None and (refusal := program.bring_back()) is not None:
            text = f"the program did not take its memory back: {refusal}"
            raise self._ruin(text) if self._is_undoing else Trouble(text)

    def _in_state(self, state: CudaProcessState) -> list[TrackedProcess]:
        return [process for process, current in self._states.items() if current is state]

    def _read_states(self, processes: Sequence[TrackedProcess]) -> None:
        for process in processes:
            process_tree.send(process, signal.SIGCONT)
        for process in processes:
            self._known[process.pid, process.started] = process
            try:
                state = self._driver.state(process.pid)
            except DriverError as error:
                if self._is_undoing or process_tree.read_again(process) is None:
                    continue
                raise Trouble(f"the driver does not tell the state of process {process.pid}: {error}") from None
            if state is CudaProcessState.FAILED:
                raise self._ruin(f"process {process.pid} has failed in the driver")
            if state is not None:
                self._states[process] = state

    def _call_for_each(self, processes: Sequence[TrackedProcess], step: _DriverCall) -> None:
        """Call the driver for all of the processes side by side, as it moves the memory of each by one thread of it.
        Raises the first Trouble, after all calls are over."""
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            calls = [pool.submit(self._call_driver, process, step) for process in processes]
        for each in calls:
            each.result()

    def _call_driver(self, process: TrackedProcess, step: _DriverCall) -> None:
        """Call the driver for a process that still lives."""
        if not self._is_undoing:
            self._check()
        try:
            if process_tree.read_again(process) is not None:
                getattr(self._driver, step.call)(process.pid)
        except DriverError as error:
            text = f"process {process.pid} could not {step.action}: {error}"
            if process_tree.read_again(process) is not None:
                raise (self._ruin(text) if step.is_fatal else Trouble(text)) from None
        self._states[process] = step.new_state

    def _ruin(self, text: str) -> Trouble:
        """Continue all processes, so that the attempt can be ended like any other."""
        for process in self._known.values():
            process_tree.send(process, signal.SIGCONT)
        return Trouble(text, is_ruined=True)

    def _stop(self, processes: Sequence[TrackedProcess]) -> None:
        with contextlib.ExitStack() as held:
            for path in self._mutexes:  # a stopped process that holds one would block everything that needs it
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    held.callback(os.close, descriptor)
                    if not lock_within(descriptor, 2.0):
                        raise Trouble(f"another process held {path} for 2 s")
            running = [process for process in processes if process_tree.send(process, signal.SIGSTOP)]
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                running = [now for each in running if (now := process_tree.read_again(each)) and not now.is_stopped]
                if not running:
                    break
                time.sleep(0.002)
