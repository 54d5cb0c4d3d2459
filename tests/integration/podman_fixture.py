"""Real rootless podman for a test: an unprivileged user with a queue of its own, in a private mount namespace.

Nothing of the machine changes: the user, its subordinate uids and a readable path to Python exist in the namespace
only. Podman's storage is copied (vfs), its runtime is runc and its network is the host's: test machines may lack
overlay, cgroup v2 and /dev/net/tun.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integration.queue_fixture import is_gone, until

IMAGE = "localhost/tiny"
UID = 61007
_SOURCE = Path(__file__).resolve().parents[2] / "src"
# The folders of the host that a program in the container needs: the image itself is empty.
NEEDED = sorted(
    {"/usr", sys.base_prefix, sys.prefix, str(_SOURCE), *(path for path in sys.path if "-packages" in path)}
)


class PodmanUser:
    def __init__(self, place: Path) -> None:
        self.home, self.work, self._run_dir = place / "home", place / "home" / "work", place / "run"
        for folder in (self.home, self.work, self._run_dir, self.home / ".config" / "containers"):
            folder.mkdir(parents=True)
        self.queue_home = self.home / "gpuyard"
        self.queue_home.mkdir(mode=0o700)
        settings = self.home / ".config" / "containers"
        (settings / "storage.conf").write_text('[storage]\ndriver = "vfs"\n')
        (settings / "containers.conf").write_text('[containers]\nnetns = "host"\n[engine]\nruntime = "runc"\n')
        _make_image(place / "image.tar")
        _copy_etc(place / "etc")
        for path in (self.home, *self.home.rglob("*"), self._run_dir):
            os.chown(path, UID, UID)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", _set_up(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.run("podman", "import", "--quiet", str(place / "image.tar"), IMAGE)

    def run(self, *command: str, expects: tuple[int, ...] = (0,), environment: Mapping[str, str] = {}) -> str:
        """Run a command as the user, and return its output. `expects` are the exit statuses that are no error."""
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self._run_dir),
            "GPUYARD_HOME": str(self.queue_home),
            "GPUYARD_SIMULATE": "2x24GB",
            **environment,
        }
        enter = ["nsenter", "--mount", f"--target={self._holder.pid}", f"--setuid={UID}", f"--setgid={UID}"]
        result = subprocess.run(
            [*enter, f"--wd={self.work}", "--", *command], env=variables, capture_output=True, text=True, check=False
        )
        assert result.returncode in expects, f"{shlex.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout + result.stderr

    def gpuyard(self, *arguments: str, **environment: str) -> str:
        return self.run(sys.executable, "-m", "gpuyard", *arguments, environment=environment)

    def submit(self, *arguments: str, **environment: str) -> int:
        """Submit a job in a container that sees this machine's Python, and return its id."""
        mounts = [f"--mount={path}:ro" for path in NEEDED] + [f"--mount={self.queue_home}"]
        answer = self.gpuyard("submit", "--json", "--image", IMAGE, *mounts, *arguments, **environment)
        return int(json.loads(answer[answer.index("{") :].partition("\ngpuyard:")[0])["first"])

    def wait(self, job: int | str) -> None:
        """Wait until the job has finished in any way."""
        self.run(sys.executable, "-m", "gpuyard", "wait", str(job), "--timeout", "90s", expects=(0, 5, 6))

    def job(self, job_id: int) -> Any:
        return json.loads(self.gpuyard("show", "--json", str(job_id)))

    def log_of(self, job_id: int) -> str:
        path = self.queue_home / "logs" / f"{job_id}.1.log"
        return path.read_text() if path.exists() else ""

    def containers(self) -> list[Any]:
        found: list[Any] = json.loads(self.run("podman", "ps", "--all", "--format", "json"))
        return found

    def pause_pid(self) -> int | None:
        """Return podman's pause process, which the first podman starts."""
        return next((pid for pid in self._processes() if "-P" in _arguments(pid)[1:2]), None)

    def daemon_pid(self) -> int | None:
        return next((pid for pid in self._processes() if "gpuyard.daemon" in _arguments(pid)), None)

    def close(self) -> None:
        """End all processes of this user that carry this queue or this home, by pid, and leave the namespace."""
        daemon = self.daemon_pid()
        if daemon is not None:
            self.run(sys.executable, "-m", "gpuyard", "cancel", "all", expects=(0, 1, 2, 3))
            self.wait("all")
            kill(daemon)
        for pid in self._processes():
            kill(pid)
        self._holder.communicate(b"")

    def _processes(self) -> Iterator[int]:
        """Podman's pause process lives on: it has this test's home in its environment."""
        mark = f"HOME={self.home}".encode()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and not is_gone(int(name)):
                    yield int(name)


@contextlib.contextmanager
def podman_user() -> Iterator[PodmanUser]:
    place = Path(tempfile.mkdtemp(prefix="gpuyard-podman-"))
    place.chmod(0o755)
    user = PodmanUser(place)
    try:
        yield user
    finally:
        user.close()
        until(lambda: _remove(place), f"{place} can be removed")


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def kill(pid: int) -> None:
    """Kill a process that the test started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid), f"the end of {pid}")


def _remove(place: Path) -> bool:
    shutil.rmtree(place, ignore_errors=True)
    return not place.exists()


def _make_image(path: Path) -> None:
    """Write a root file system without programs: links into /usr, which a job mounts, and an open /tmp."""
    with tarfile.open(path, "w") as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(link)
        for name, mode in (("tmp", 0o1777), ("etc", 0o755), ("usr", 0o755)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
    path.chmod(0o644)


def _copy_etc(target: Path) -> None:
    """Copy /etc, and add the user with subordinate uids."""
    subprocess.run(["cp", "-a", "/etc", target], check=True)
    for name, line in (
        ("passwd", f"gyard:x:{UID}:{UID}::/:/bin/sh"),
        ("group", f"gyard:x:{UID}:"),
        ("subuid", "gyard:700000:65536"),
        ("subgid", "gyard:700000:65536"),
    ):
        with (target / name).open("a") as file:
            file.write(f"{line}\n")


def _set_up(place: Path) -> str:
    """Return the shell commands that prepare the namespace. Folders that only root may enter, as /root, are replaced by
    folders with nothing but the needed paths in them."""
    lines = [f"mount --bind {place}/etc /etc"]
    hidden: dict[str, list[str]] = {}
    for path in NEEDED:
        closed = next((str(each) for each in reversed(Path(path).parents) if not each.stat().st_mode & 0o001), None)
        if closed is not None:
            hidden.setdefault(closed, []).append(path)
    for closed, paths in hidden.items():
        lines += [f"mkdir -p {place}/kept/{index} && mount --bind {path} {place}/kept/{index}"
                  for index, path in enumerate(paths)]  # fmt: skip
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {closed}")
        lines += [f"mkdir -p {path} && mount --move {place}/kept/{index} {path}" for index, path in enumerate(paths)]
    return "\n".join([*lines, "echo ready", "exec cat"])
