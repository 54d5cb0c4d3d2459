"""The keepers of a queue: the one that starts new attempts, and those of earlier attempts.

A keeper that is stopped (SIGSTOP), hangs or cannot be reached is never waited for, and counts as alive. Meanwhile
another keeper starts new attempts.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence

from gpuyard.engines.local.keeper_connection import (
    KeeperConnection,
    KeeperUnreachable,
    connect,
    silent_problem,
    spawn_keeper,
)
from gpuyard.errors import EnvironmentFault
from gpuyard.system.system_limits import remedy_of
from gpuyard.system.wakeable_poll import WakeablePoll

_log = logging.getLogger(__name__)
# With this many keepers that do not answer, new attempts wait: what stops one may stop all.
_MOST_SILENT = 4


class KeeperSet:
    def __init__(self, folder: str, journal: int, open_files: int, poll: WakeablePoll) -> None:
        """`folder` holds their sockets, `journal` is the descriptor that they write to, `open_files` the limit on open
        files for their jobs, and `poll` watches the connections."""
        self.folder = folder
        self.own: KeeperConnection | None = None  # starts new attempts
        self._journal, self._open_files, self._poll = journal, open_files, poll
        self._connected: dict[int, KeeperConnection] = {}  # by descriptor
        self._silent: dict[int, KeeperConnection] = {}  # by pid; replaced as the keeper of new attempts
        self._unreached: dict[int, str] = {}  # by pid: why there is no connection yet

    def close(self) -> None:
        for connection in list(self._connected.values()):
            self.drop(connection)

    # Our own

    def own_or_new(self) -> KeeperConnection:
        """Return our own keeper; start one if there is none. Raises EnvironmentFault if that fails, or if it has not
        answered in time."""
        if self.own is None:
            try:
                self.own = spawn_keeper(self.folder, self._journal, self._open_files)
            except OSError as error:
                raise EnvironmentFault(
                    f"the keeper of jobs cannot be started: {error.strerror}", hint=remedy_of(error)
                ) from error
            self._add(self.own)
        if self.own.is_late and not self.own.is_greeted:
            raise EnvironmentFault(
                f"the keeper of jobs (process {self.own.pid}) has not answered yet",
                hint="the machine is busy, or a file system hangs",
            )
        return self.own

    def leave_silent(self, own: KeeperConnection) -> None:
        """Leave its attempts with a keeper that does not answer: the next ones get another. Raises EnvironmentFault if
        too many do not answer."""
        self._silent = {pid: each for pid, each in self._silent.items() if self._is_silent(each)}
        if len(self._silent) >= _MOST_SILENT:
            pids = " ".join(map(str, self._silent))
            raise EnvironmentFault(
                f"{len(self._silent)} keepers of jobs do not answer (processes {pids})",
                hint=f"`kill -CONT {pids}` if they are stopped, or see whether a file system that jobs use hangs",
            )
        self._silent[own.pid] = own
        self.own = None
        _log.warning("%s; another keeper starts new jobs", silent_problem(own.pid))

    def send(self, connection: KeeperConnection, content: bytes, leases: Sequence[int]) -> bool:
        """Return False if the keeper is gone or not reading; nothing was sent."""
        is_sent = connection.send(content, leases)
        self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)
        return is_sent

    def withdraw(self, pid: int, key: str) -> None:
        """Ask a keeper not to start a launch, if there is a connection to it."""
        connection = next((each for each in self._connected.values() if each.pid == pid), None)
        if connection is not None:
            connection.withdraw(key)
            self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)

    # All of them

    def ready(self) -> Iterator[KeeperConnection]:
        """Yield the connections that have something to read, or whose keepers are gone."""
        for connection in self._poll.ready(self._connected):
            if connection.has_unsent:
                connection.send_rest()
                self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)
            yield connection

    def drop(self, connection: KeeperConnection) -> None:
        self._poll.forget(connection.fileno())
        del self._connected[connection.fileno()]
        connection.close()
        if connection is self.own:
            self.own = None
        with contextlib.suppress(ChildProcessError):  # an earlier daemon's
            os.waitpid(connection.pid, os.WNOHANG)

    def problems(self) -> list[str]:
        """Return a line for each keeper that does not answer now."""
        silent = [silent_problem(each.pid) for each in self._connected.values() if self._is_silent(each)]
        return [*silent, *(silent_problem(pid, why) for pid, why in self._unreached.items())]

    # Those of earlier daemons

    def adopt(self, pids: Iterable[int]) -> set[int]:
        """Connect to these keepers. Return the pids of all keepers that count as alive."""
        for pid in pids:
            self._reach(pid)
            if pid in self._unreached:
                _log.warning("%s", silent_problem(pid, self._unreached[pid]))
        return {*self._unreached, *self._connected_pids()}

    def reach_again(self) -> Iterator[int]:
        """Try to connect to the keepers that could not be reached. Yield the pids of those that are gone."""
        for pid in list(self._unreached):
            self._reach(pid)
            if pid not in self._unreached and pid not in self._connected_pids():
                yield pid

    def _reach(self, pid: int) -> None:
        """Connect to the keeper of an earlier daemon. If it is gone, `_connected` and `_unreached` are without it."""
        try:
            connection = connect(self.folder, pid)
        except KeeperUnreachable as error:
            self._unreached[pid] = error.message
            return
        self._unreached.pop(pid, None)
        if connection is not None:
            self._add(connection)

    def _connected_pids(self) -> set[int]:
        return {each.pid for each in self._connected.values()}

    def _add(self, connection: KeeperConnection) -> None:
        self._connected[connection.fileno()] = connection
        self._poll.watch(connection.fileno())

    def _is_silent(self, connection: KeeperConnection) -> bool:
        is_connected = self._connected.get(connection.fileno()) is connection
        return is_connected and connection.is_silent()
