"""Which machine a queue belongs to, where several machines can see its folder: `queue.host` names it.

- A daemon starts only on that machine. To any other, locks, sockets and pids say nothing, and running jobs would look
dead.
- The first daemon creates the file with O_EXCL, which only one machine can do, also where locks are local.
- Only `gpuyard daemon adopt` gives a queue to another machine. A daemon that still runs on the first one then starts no
further jobs (`daemon/loop_wakeups.py`).
- If the state folder is on a local disk in place of a shared one, each machine has a queue of its own, and a copy of
the record in the shared folder, `hosts/NAME`, tells the others about it. It may be outdated, or missing."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system.private_files import PrivateFileError, make_folder, open_own
from gpuyard.system.processes import boot_id, host_name, is_this_machine, machine_id, machine_name, name_of
from gpuyard.system.user_directories import LOCAL, file_system, find_state_directory
from gpuyard.system.write_files import write_atomically

_NAME, _HOSTS = "queue.host", "hosts"
_PAUSE_S = 0.01
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", re.ASCII)


class QueueHost(Struct, frozen=True, kw_only=True):
    """The machine of a queue. `since`: when its daemon started, by the wall clock; None if it was stopped. `address` is
    the machine's name with its domain, and `program` starts gpuyard there."""

    host: str
    address: str
    program: tuple[str, ...]
    machine_id: str | None = None
    boot_id: str | None = None
    since: float | None = None

    @property
    def is_here(self) -> bool:
        return is_this_machine(self.machine_id, self.boot_id, self.host)

    def has_queue_here(self, folder: str) -> bool:
        """Return whether this is the machine, for a record in `folder`. On a local disk, a new name does not matter."""
        is_local = file_system(folder) in LOCAL
        return is_this_machine(self.machine_id, self.boot_id, self.host, is_on_local_disk=is_local)

    @property
    def state(self) -> str:
        if self.since is None:
            return "its daemon is stopped"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"its daemon was started there on {started}"


class QueueElsewhere(EnvironmentFault):
    """The queue belongs to another machine, `host`."""

    code = "elsewhere"

    def __init__(self, message: str, host: QueueHost, *, hint: str) -> None:
        setting = 'or set `reach = "ssh"` under [queue] in config.toml'
        super().__init__(message, hint=f"use it there: `ssh {host.address} gpuyard queue` ({setting}); {hint}")
        self.host = host


def refuse_other_machine(folder: str) -> None:
    """Raise QueueElsewhere if the queue in this folder belongs to another machine."""
    found = _read(f"{folder}/{_NAME}")
    if found is not None and not found.has_queue_here(folder):
        raise QueueElsewhere(
            f"this queue belongs to the host {found.host} ({found.state}), and this is {host_name()}: {folder}",
            found,
            hint=(
                f"for a queue on {host_name()}, set XDG_STATE_HOME or GPUYARD_HOME to a folder on its own disk; "
                f"if {found.host} is gone for good, `gpuyard daemon adopt --from {found.host}`"
            ),
        )


def refuse_second_queue(folder: str) -> None:
    """Raise QueueElsewhere if the queue belongs to another machine, or if this machine has none and another has one."""
    refuse_other_machine(folder)
    place = find_state_directory()
    if place.path != folder or place.problem is None or os.path.lexists(f"{folder}/{_NAME}"):
        return
    others = [each for each in known_hosts(place.wanted) if each.since is not None and not each.is_here]
    if others:
        latest = max(others, key=lambda each: each.since or 0.0)
        raise QueueElsewhere(
            f"your queue is on the host {latest.host} ({latest.state}), and {host_name()} has none",
            latest,
            hint=f"`gpuyard daemon start` starts a second queue, on {host_name()}",
        )


def known_hosts(folder: str) -> list[QueueHost]:
    found: list[QueueHost | None] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"{folder}/{_HOSTS}")):
            with contextlib.suppress(EnvironmentFault, OSError):
                found.append(_read(f"{folder}/{_HOSTS}/{name}"))
    return [host for host in found if host is not None]


@contextlib.contextmanager
def hold_queue(folder: str) -> Iterator[Callable[[], bool]]:
    """Record that this machine runs the queue, or raise QueueElsewhere. Yields whether it is still this machine's."""
    path, before = f"{folder}/{_NAME}", None
    try:
        if not _create(path, _this_host(time.time())):  # never removed: the queue stays this machine's
            refuse_other_machine(folder)
            before = _read(path)
            _write(path, _this_host(time.time()))
        held = os.lstat(path)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint="free some disk space") from error
    _publish(folder, _this_host(time.time()), before)

    def is_unchanged() -> bool:
        return os.path.samestat(os.lstat(path), held)

    def is_ours() -> bool:
        with contextlib.suppress(OSError, EnvironmentFault):  # which say nothing about another machine
            found = None if is_unchanged() else _read(path)
            return found is None or found.has_queue_here(folder)
        return True

    try:
        yield is_ours
    finally:
        with contextlib.suppress(OSError):
            if is_unchanged():
                _write(path, _this_host(None))
                _publish(folder, _this_host(None))


def adopt_queue(folder: str, host: str) -> None:
    """Give the queue of another machine to this one. Raises UserError if the queue is not that machine's."""
    found = _read(f"{folder}/{_NAME}")
    if found is None or found.has_queue_here(folder):
        raise UserError(f"the queue in {folder} belongs to no other machine", hint="`gpuyard daemon start` starts it")
    if found.host != host.partition(".")[0].lower():
        raise UserError(f"the queue in {folder} belongs to {found.host}", hint=f"write `--from {found.host}`")
    _write(f"{folder}/{_NAME}", _this_host(None))


def _this_host(since: float | None) -> QueueHost:
    program, address = (sys.executable, "-P", "-m", "gpuyard"), os.uname().nodename
    ids = {"machine_id": machine_id(), "boot_id": boot_id()}
    return QueueHost(host=host_name(), address=address, program=program, since=since, **ids)


def _read(path: str) -> QueueHost | None:
    """Return the record, or None if there is none. Raises EnvironmentFault if it cannot be read."""
    try:
        content = _content(path)
        found = msgspec.json.decode(content, type=QueueHost) if content else None
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentFault(
            f"{path} cannot be read, so it is unknown which machine this queue belongs to: {error}",
            hint="if no other machine uses this folder, remove the file",
        ) from error
    if found is not None and not (_HOST.fullmatch(found.host) and _HOST.fullmatch(found.address)):
        raise EnvironmentFault(f"{path} names no host", hint="if no other machine uses this folder, remove the file")
    return found


def _content(path: str) -> bytes:
    """Return the content. A file that stays empty was left by a daemon that died before it wrote to it."""
    for attempt in range(200):
        try:
            with open(open_own(path, os.O_RDONLY), "rb") as file:
                if content := file.read(4096):
                    return content
        except FileNotFoundError:
            break
        except PrivateFileError:
            if attempt >= 5:  # it was replaced while it was opened
                raise
        time.sleep(_PAUSE_S)
    return b""


def _write(path: str, host: QueueHost) -> None:
    write_atomically(path, msgspec.json.encode(host), exact_mode=0o600)


def _create(path: str, host: QueueHost) -> bool:
    """Return False if the file exists, or if another machine took it for a file that stays empty and replaced it."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(host))
            file.flush()
            os.fsync(file.fileno())
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileExistsError:
        return False


def _publish(folder: str, host: QueueHost, before: QueueHost | None = None) -> None:
    """Tell the other machines that share the folder which this one stands for. Nothing depends on it. `before` is this
    machine's earlier record: if it had another name then, what it published under it is removed."""
    place = find_state_directory()
    if place.path == folder and place.problem is not None:
        with contextlib.suppress(OSError, PrivateFileError):
            make_folder(f"{place.wanted}/{_HOSTS}")
            _write(f"{place.wanted}/{_HOSTS}/{machine_name()}", host)
            earlier = machine_name() if before is None else name_of(before.host, before.machine_id)
            if earlier != machine_name():
                os.unlink(f"{place.wanted}/{_HOSTS}/{earlier}")
