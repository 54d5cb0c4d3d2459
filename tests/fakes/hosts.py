"""Machines made of namespaces, which share a home on one disk. Needs root, and bindfs.

Each has a host name, a machine id, a boot id, processes and a /var/tmp of its own. To end one is a power cut.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

# Locks that hold on one machine only, as with `nolock` or `local_lock=all` of NFS, and locks that all machines see.
LOCAL_LOCKS: tuple[str, ...] = ()
CLUSTER_LOCKS = ("--multithreaded", "--enable-lock-forwarding")
_INIT = Path(__file__).with_name("host_init.py")
_DEADLINE_S = 90.0


class Host:
    """`kind` is the type of the home's file system, such as `fuse.sshfs`."""

    def __init__(self, name: str, folder: Path, *, kind: str, locks: Sequence[str] = LOCAL_LOCKS) -> None:
        """`folder` is the same for all machines that share a home."""
        self.name, self.home = name, folder / "home"
        self.var_tmp, self._folder, self._disk = folder / name / "var-tmp", folder / name, folder / "disk"
        self._kind = kind
        self._options = (*locks, "-o", f"subtype={kind.removeprefix('fuse.')}")
        self._init: subprocess.Popen[str] | None = None
        for each in (self.home, self._disk, self.var_tmp):
            each.mkdir(parents=True, exist_ok=True)
        self.var_tmp.chmod(0o1777)
        self.set_machine_id(uuid.uuid4().hex)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "GPUYARD_SIMULATE": "2x24GB",
            "LANG": "C.UTF-8",
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
        }
        self.boot()

    def set_machine_id(self, value: str) -> None:
        (self._folder / "machine-id").write_text(f"{value}\n")

    def trust_file_system(self) -> None:
        """Record that the home's file system has passed the test. bindfs forwards fcntl locks in its own name, so with
        CLUSTER_LOCKS it fails, unlike the file systems that it stands for."""
        for place in (".local/state/gpuyard", ".gpu_locks"):
            (self._disk / place).mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._disk / place / f"file-system.{self.name}").write_text(f"{self._kind}: passed\n")

    def boot(self) -> None:
        (self._folder / "boot-id").write_text(f"{uuid.uuid4()}\n")
        command = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f'hostname {self.name} && exec "$@"'
        init = [sys.executable, "-S", str(_INIT), str(self._folder), str(self._disk), str(self.home), *self._options]
        self._init = subprocess.Popen(
            [*command, "sh", "-c", script, "sh", *init], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "ready\n"

    def power_off(self) -> None:
        """Kill everything on this machine at once."""
        if self._init is not None:
            self._init.kill()  # and so the first process, and with it all others
            self._init.wait(_DEADLINE_S)
            assert self._init.stdout is not None
            self._init.stdout.read()  # until the last process with it has ended
            self._init.stdout.close()
            self._init = None

    def gpuyard(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.shell('exec "$@"', sys.executable, "-m", "gpuyard", *arguments)

    def shell(self, script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        assert self._init is not None
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        enter = ["nsenter", "--target", children.split()[0], "--mount", "--uts", "--pid"]
        return subprocess.run(
            [*enter, "sh", "-c", f"cd {self._folder} && {script}", "sh", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
