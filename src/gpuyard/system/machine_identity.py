"""Which machine this is: its id (`/etc/machine-id`), its boot id, which the kernel makes at each start, and its name.

None of them is enough. Containers often have no machine id, nodes that were installed from one image have the same id,
a boot id lasts until the machine is restarted, and several containers on one kernel have the same boot id.

It imports little, because commands with a home on a network file system import it.
"""

import os

_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_LONGEST_HOST = 64
_read_before: "dict[str, str | None]" = {}


def machine_id() -> str | None:
    """Return a digest of the machine's id, which must not be shown itself; None if the machine has no id."""
    content = next(filter(None, map(_read, _ID_FILES)), None)
    if content is None or len(content) != 32 or not all(each in "0123456789abcdef" for each in content):
        return None  # missing, empty, or `uninitialized`
    return _digest(content)


def boot_id() -> str | None:
    return _read(_BOOT_FILE)


def host_name() -> str:
    """Return the name of this machine without its domain, as it is shown and compared."""
    name = os.uname().nodename.partition(".")[0].lower()
    return "".join(each if each.isalnum() or each in "-_" else "?" for each in name)[:_LONGEST_HOST] or "localhost"


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
    - Where the system has neither id nor boot id, nothing can be said, and the record counts as ours.
    """
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
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                _read_before[path] = file.read().strip() or None
        except OSError:
            _read_before[path] = None
    return _read_before[path]
