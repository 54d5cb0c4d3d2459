"""A cgroup for each job whose RAM is limited (`[host] enforce_ram`), where cgroup v2 is delegated to this user.

- The daemon makes the cgroup and sets its limit; the job joins it as its first act (`spawn_program`). Keepers are never
  inside: the kernel may end everything in there.
- A cgroup that has processes of its own cannot limit its children. So the daemon, keepers and jobs without a limit have
  to be in a child `gpuyard-daemon` of the delegated cgroup: systemd starts the daemon there (`DelegateSubgroup=`), or
  the daemon moves there if it is not in a unit. Other processes are never moved.
- If a job takes more, the kernel ends all its processes at once, and counts that in the job's cgroup. The daemon reads
  the count at the end, and removes the cgroup; if processes were left behind in it, later.
- Without delegation jobs run without a limit. The daemon's log, `gpuyard daemon status` and `gpuyard doctor` say
  why."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.model.out_of_memory import RamLimit

_log = logging.getLogger(__name__)
_ROOT = Path("/")
_OWN_CHILD = "gpuyard-daemon"
_MB = 1 << 20
_DELEGATE = (
    f"run the daemon as a systemd user unit with Delegate=yes and DelegateSubgroup={_OWN_CHILD}: "
    "see docs/how-to/host-memory.md"
)


def find_delegated(process: str = "self", root: Path = _ROOT) -> Path:
    """Return the cgroup in which those of the process's jobs can be made. EnvironmentFault says what is missing."""
    lines = _read(root / "proc" / process / "cgroup").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    mounts = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
    mount = next((each for each in mounts if (each / "cgroup.controllers").exists()), None)
    if path is None or mount is None:
        raise EnvironmentFault("this system has no cgroup v2", hint="boot with systemd.unified_cgroup_hierarchy=1")
    own = mount / path.lstrip("/")
    base = own.parent if own.name == _OWN_CHILD else own
    if "memory" not in _read(base / "cgroup.controllers").split():
        is_old = (root / "sys/fs/cgroup/memory").exists()
        raise EnvironmentFault(
            f"the cgroup {base} has no memory controller{', as cgroup v1 has it' if is_old else ''}",
            hint="boot with systemd.unified_cgroup_hierarchy=1" if is_old else _DELEGATE,
        )
    if own.name.endswith((".service", ".scope", ".slice")):
        raise EnvironmentFault(f"the daemon is in the cgroup {own} itself, not in a child", hint=_DELEGATE)
    needed = (base, base / "cgroup.procs", base / "cgroup.subtree_control")
    closed = next((each for each in needed if not os.access(each, os.W_OK)), None)
    if closed is not None:
        raise EnvironmentFault(f"this user cannot write to {closed}", hint=_DELEGATE)
    return base


class JobCgroups:
    def __init__(self, queue: str, root: Path = _ROOT) -> None:
        digest = hashlib.sha256(queue.encode(errors="surrogateescape")).hexdigest()[:8]
        self._prefix = f"gpuyard-{digest}-"
        self._root = root
        self._base: Path | None = None
        self._problem: str | None = None
        self._left: set[Path] = set()  # groups in which processes still were at the end of their jobs

    def open(self) -> Path | None:
        """Make the own cgroup ready for those of jobs; return it, or None if that is not possible here."""
        if self._base is None and self._problem is None:
            try:
                base = find_delegated(root=self._root)
                _enable_memory(base)
                self._base = base
                return base
            except EnvironmentFault as error:
                why = error.with_hint
            except OSError as error:
                why = f"the cgroup of the daemon cannot be used: {error.strerror} ({_DELEGATE})"
            self._problem = f"[host] enforce_ram is set, but jobs run without a limit of RAM: {why}"
            _log.warning("%s", self._problem)
        return self._base

    def problems(self) -> list[str]:
        return [] if self._problem is None else [self._problem]

    def create(self, key: str, limit_mb: float | None) -> str:
        """Make the cgroup of an attempt; return its folder, or an empty text if it runs without one."""
        base = self.open() if limit_mb is not None else None
        if base is None or limit_mb is None:
            return ""
        group = base / f"{self._prefix}{key}"
        try:
            group.mkdir(exist_ok=True)
            (group / "memory.max").write_text(str(int(limit_mb * _MB)))
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                with contextlib.suppress(OSError):  # the machine has no swap, or the kernel is older
                    (group / name).write_text(value)
        except OSError as error:
            _log.warning("job %s runs without a limit of RAM: %s: %s", key, group, error.strerror)
            _remove(group)
            return ""
        return str(group)

    def end(self, key: str) -> RamLimit | None:
        """Return what became of the limit of an attempt that is over, and remove its cgroup; None if it had none."""
        self._left = {group for group in self._left if not _remove(group)}
        base = self._base
        group = None if base is None else base / f"{self._prefix}{key}"
        if group is None or not group.exists():
            return None
        events = _read(group / "memory.events").splitlines()
        limit = RamLimit(
            limit_mb=_megabytes(group / "memory.max"),
            kills=next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0),
            peak_mb=_megabytes(group / "memory.peak"),
        )
        self._left |= set() if _remove(group) else {group}
        return limit

    def take_over(self, live: Collection[str]) -> None:
        """Find the cgroups of an earlier daemon again, and remove those of attempts that are not live."""
        with contextlib.suppress(EnvironmentFault, OSError):
            base = find_delegated(root=self._root)
            groups = [group for group in base.iterdir() if group.name.startswith(self._prefix)]
            if groups:
                self._base = base
            self._left |= {group for group in groups if group.name.removeprefix(self._prefix) not in live}
        self._left = {group for group in self._left if not _remove(group)}


def _enable_memory(base: Path) -> None:
    """Let children of the cgroup have limits of memory. Raises OSError if other processes are in it."""
    if "memory" in _read(base / "cgroup.subtree_control").split():
        return
    if (base / "cgroup.type").exists():  # not the topmost cgroup of the machine, for which the rule does not hold
        own = base / _OWN_CHILD
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
    (base / "cgroup.subtree_control").write_text("+memory")


def _remove(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _megabytes(path: Path) -> float | None:
    text = _read(path).strip()
    return int(text) / _MB if text.isdecimal() else None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
