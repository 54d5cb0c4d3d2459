"""Finds a folder on a local disk in place of one on a file system that other machines may share.

The queue's database, its locks and its sockets work on one machine only. Where a folder is on a network file system,
or on an unknown one that fails a test of locks and of SQLite, a folder of this user on a local disk takes its place:

    /var/lib/gpuyard/UID/NAME       if an administrator made /var/lib/gpuyard with mode 1777
    /var/tmp/gpuyard-UID/NAME       which all systems have, and which is kept when the machine restarts

NAME is a digest of the path that it stands for. The name of the machine is no part of it: a machine that is renamed
would get a second queue for the same GPUs. A folder that exists is used before a new one is made, so a queue stays
where it is. Other users can write to the folders above, so all of it is checked
(`private_files.py`). An unknown file system is tested once for each machine; the result is kept in the folder.

A test that succeeds does not show that no other machine sees the folder: `connect/queue_host.py` guards against that.

It imports little, because every command imports it.
"""

import os
import sys

from gpuyard.errors import EnvironmentFault
from gpuyard.system.file_systems import LOCAL, NETWORK, file_system

_BASES = ("/var/lib/gpuyard/{uid}", "/var/tmp/gpuyard-{uid}")  # noqa: S108 - checked as described above
_TEST = "gpuyard.store.folder_check"
_TEST_S = 60.0
_PASSED = "passed"
_found: "dict[str, LocalFolder]" = {}


class LocalFolder:
    """`path` is used in place of `wanted`, which is on a file system of the type `kind`. `problem` is the reason, None
    if both are the same."""

    def __init__(self, wanted: str, path: str, kind: str | None, problem: str | None) -> None:
        self.wanted, self.path, self.kind, self.problem = wanted, path, kind, problem


def find_local_folder(wanted: str) -> LocalFolder:
    """Return the folder to use. It stays the same for this process. Raises EnvironmentFault if there is none."""
    found = _found.get(wanted)
    if found is None:
        kind = file_system(wanted)
        problem = sharing_problem(wanted, kind)
        path = wanted if problem is None else _make_instead(wanted, problem)
        found = _found[wanted] = LocalFolder(wanted, path, kind, problem)
    return found


def sharing_problem(folder: str, kind: str | None = None) -> str | None:
    """Return why the folder, on a file system of this type, must not hold what one machine locks; None if it may."""
    kind = kind or file_system(folder)
    if kind is None or kind in LOCAL:
        return None
    if kind in NETWORK:
        return f"it is on a network file system ({kind})"
    verdict = _test(folder, kind)
    return None if verdict == _PASSED else f"its file system ({kind}) may be shared: {verdict}"


def _test(folder: str, kind: str) -> str:
    """Return `passed`, or why the folder cannot be used. The result of an earlier test counts."""
    from gpuyard.system.machine_identity import host_name
    from gpuyard.system.private_files import PrivateFileError, make_folder, open_own

    record = f"{folder}/file-system.{host_name()}"
    try:
        with open(open_own(record, os.O_RDONLY), encoding="utf-8") as file:
            tested, _, verdict = file.read().strip().partition(": ")
        if tested == kind and verdict:
            return verdict
    except (OSError, PrivateFileError):
        pass
    try:
        make_folder(folder)
        verdict = _run_test(folder)
        with open(open_own(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(f"{kind}: {verdict}\n")
    except OSError:
        return _PASSED  # it cannot be written, which the caller will find and report
    except PrivateFileError as error:
        return _PASSED if isinstance(error.__cause__, OSError) else error.message
    return verdict


def _run_test(folder: str) -> str:
    import subprocess

    command = [sys.executable, "-P", "-m", _TEST, folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TEST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"a test of its locks did not end within {_TEST_S:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else "a test of its locks failed"


def _make_instead(wanted: str, problem: str) -> str:
    from gpuyard.system.private_files import PrivateFileError, check_folder, make_folder

    name = _name(wanted)
    tops, problems = [], []
    for base in _BASES:
        top = base.format(uid=os.geteuid())
        above = os.path.dirname(top)
        kind = file_system(above)
        if not os.path.isdir(above):
            continue
        if kind is not None and kind not in LOCAL:
            problems.append(f"{above} is on {kind}")
        else:
            tops.append(top)
    tops.sort(key=lambda top: not os.path.isdir(f"{top}/{name}"))  # a folder that exists first
    for top in tops:
        try:
            check_folder(top)
            make_folder(f"{top}/{name}")
        except PrivateFileError as error:
            problems.append(error.message)
        else:
            return f"{top}/{name}"
    raise EnvironmentFault(
        f"{wanted} cannot hold a queue: {problem}; and there is no folder on a local disk: "
        f"{'; '.join(problems) or 'there is no /var/tmp'}",
        hint="set XDG_STATE_HOME to a folder on a local disk that is yours alone",
    )


def _name(wanted: str) -> str:
    import hashlib

    return hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
