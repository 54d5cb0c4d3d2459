"""Which process this is, and on which machine: pids are used again, but not a pid with its start time and the boot id.
And commands that run a module of this package in a new process.

A machine has an id (`/etc/machine-id`), a boot id, which the kernel makes at each start, and a name. None is enough:
containers often have no machine id, nodes installed from one image have the same, a boot id lasts until the machine is
restarted, and several containers on one kernel have the same one."""

import contextlib
import os
import pwd
import sys
from functools import lru_cache

from gpuyard.model.printable_text import printable
from gpuyard.system.submitting_shell import stat_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.model.lease import Holder

_read_before: "dict[str, str | None]" = {}


def machine_id() -> str | None:
    """Return a digest of the machine's id, which must not be shown itself; None if the machine has no id."""
    content = _read("/etc/machine-id") or _read("/var/lib/dbus/machine-id")
    if content is None or len(content) != 32 or not all(each in "0123456789abcdef" for each in content):
        return None  # missing, empty, or `uninitialized`
    return _digest(content)


def boot_id() -> str | None:
    return _read("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the name of this machine without its domain, as it is shown and compared."""
    name = os.uname().nodename.partition(".")[0].lower()
    return "".join(each if each.isalnum() or each in "-_" else "?" for each in name)[:64] or "localhost"


def machine_name() -> str:
    """Return a name for this machine that stays the same over restarts, and that cloned machines do not share."""
    return name_of(host_name(), machine_id())


def name_of(host: str, machine: str | None) -> str:
    """Return the `machine_name` of a machine with this host name and id."""
    return f"{host}-{_digest(f'{machine} {host}')}"


def is_this_machine(
    id_there: str | None, boot_there: str | None, host_there: str, *, is_on_local_disk: bool = False
) -> bool:
    """Return whether a record with these values was made on this machine. `is_on_local_disk`: no other machine sees it.

    - Two ids that differ are two machines, also on one kernel: containers with systems of their own.
    - Otherwise one boot id is one machine. A container without an id counts as its host: locks hold for both.
    - Otherwise the machine was restarted if its name is the same, or if the record is on a local disk: machines and
      containers are renamed. Machines cloned with their id have other names, and disks of their own.
    - Where the system has neither id nor boot id, nothing can be said, and the record counts as ours."""
    here, boot = machine_id(), boot_id()
    if here and id_there and here != id_there:
        return False
    if boot is not None and boot_there is not None:
        return boot == boot_there or is_on_local_disk or host_there == host_name()
    return True


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(f"gpuyard {text}".encode()).hexdigest()[:12]


def _read(path: str) -> str | None:
    """Return the content of a file that does not change while the system runs; None if it is empty or missing."""
    if path not in _read_before:
        _read_before[path] = None
        with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            _read_before[path] = file.read().strip() or None
    return _read_before[path]


_STOPPED = ("stopped", "tracing-stop")  # by psutil's names


def this_process(label: str | None = None) -> "Holder":
    from gpuyard.model.lease import Holder  # a command that starts the daemon needs only `start_time`

    uid, pid = os.getuid(), os.getpid()
    return Holder(
        uid=uid,
        user=user_name(uid),
        pid=pid,
        pid_started=start_time(pid),
        boot_id=boot_id(),
        machine=machine_name(),
        label=tidy_label(label),
    )


def tidy_label(label: str | None) -> str | None:
    """Shorten a label to 200 characters, and make it printable."""
    return None if label is None else printable(label, 200)


@lru_cache(maxsize=256)  # the system may ask a directory server
def user_name(uid: int) -> str:
    try:
        return printable(pwd.getpwuid(uid).pw_name, 100)
    except KeyError:
        return str(uid)


def start_time(pid: int) -> float | None:
    """Return when the process started, in seconds since the machine booted, or None if there is no such process. psutil
    adds the time of the boot, which changes when the wall clock is set. Without /proc: seconds since the epoch."""
    fields = stat_fields(pid)
    if fields or os.path.isdir("/proc/self"):
        return int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else None
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def is_alive(holder: "Holder") -> bool:
    """Return whether the process that made the record still runs, under the same user."""
    import psutil

    try:
        uid = psutil.Process(holder.pid).uids().real
    except psutil.Error:
        return False
    before, started = holder.pid_started, start_time(holder.pid)
    same_start = before is None or (started is not None and abs(started - before) < 1.0)
    return same_start and uid == holder.uid and holder.boot_id in (None, boot_id())


def is_stopped(holder: "Holder") -> bool:
    """Return whether the process is stopped, as by Ctrl-Z: it would not use what is reserved for it. False for a
    process that this system does not know: the pid of one in another container may be another process here."""
    import psutil

    try:
        return psutil.Process(holder.pid).status() in _STOPPED and is_alive(holder)
    except psutil.Error:
        return False


def describe_process(pid: int) -> str:
    """Return the program, pid and user of a process for a message; only the pid if the system shows no more."""
    import psutil

    try:
        process = psutil.Process(pid)
        name, user = printable(process.name(), 60), user_name(process.uids().real)
        state = ", stopped" if process.status() in _STOPPED else ""
    except psutil.Error:
        return f"process {pid}"
    return f"{name} (pid {pid}, user {user}{state})"


def python_command(module: str, *arguments: str, options: tuple[str, ...] = ("-I",)) -> tuple[str, ...]:
    """Return a command that calls `main()` of a module of this installation, in any directory and environment. The
    default option isolates Python from both; with "-S" the module gets the standard library and this package only."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()"
    return sys.executable, *options, "-c", code, root, *arguments
