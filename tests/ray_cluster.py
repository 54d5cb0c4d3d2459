"""A real Ray for tests: a head on loopback that leaves no process behind once it is stopped.

All of its processes descend from the program `ray_warden.py`, which kills them all when the test closes its standard
input or is killed.
"""

import contextlib
import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import psutil
import pytest

from tests.free_ports import free_ports
from tests.slurm_cluster import hidden_from

CPUS, GPUS = 4, 2
_STARTS = 3
_UP_WITHIN_S, _DOWN_WITHIN_S = 120.0, 30.0
_LEAST_STORE_BYTES = 80_000_000
_PORTS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
    "--metrics-export-port",
)
_VARIABLES = {
    # Otherwise Ray replaces 127.0.0.1 by the machine's outer address, and servers listen on every address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Jobs have workers of their own, so prestarted ones would be unused.
    "RAY_prestart_worker_first_driver": "0",
    # These tests do not cover a machine that is short of memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # How often it reports its usage (default: 5 s).
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
# Each worker is set up by a program that loads all of Ray only to become the worker; this one becomes it at once, for a
# third less work per job. Anything else is left to Ray's own program.
_QUICK_SETUP = """
import json, os, sys
argv = sys.orig_argv[1:]
if argv and argv[0].endswith("/setup_worker.py"):
    options = dict(word[2:].split("=", 1) for word in argv[1:] if word.startswith("--") and "=" in word)
    context = json.loads(options.get("serialized-runtime-env-context", "{}"))
    if options.get("language") == "PYTHON" and context.get("py_executable") and not context.get("command_prefix"):
        os.environ.update(context.get("env_vars") or {})
        ours = ("--serialized-runtime-env-context=", "--language=")
        rest = [word for word in argv[1:] if not word.startswith(ours)]
        os.execv(context["py_executable"], [context["py_executable"], *rest])
"""
# As Ray's own tests start further nodes: its command line refuses a second one on loopback.
_SECOND_NODE = """
import time
from ray._private.node import Node
from ray._private.parameter import RayParams
node = Node(
    RayParams(
        gcs_address="127.0.0.1:{port}", node_ip_address="127.0.0.1", num_cpus={cpus}, num_gpus={gpus},
        object_store_memory={store}, min_worker_port=0, max_worker_port=0, include_log_monitor=False,
    ),
    head=False, shutdown_at_exit=False, spawn_reaper=False,
)
time.sleep(1e6)
"""
_WARDEN = Path(__file__).with_name("ray_warden.py")


def require_ray() -> None:
    """Skip the test if Ray is not installed; in CI, fail it."""
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("in CI ray must be installed: it is one of the development dependencies")
        pytest.skip("ray is not installed")


class RayCluster:
    """A Ray head with 4 CPUs and 2 GPUs that exist only in its configuration. `folder` holds its log."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ray.log"
        self._ports: dict[str, int] = {}
        self._warden: subprocess.Popen[bytes] | None = None
        # The sockets in there have long names already, and a path to one may have 107 characters.
        self._home = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        for _ in range(_STARTS):
            self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
            if self._comes_up():
                return
        self._fail()

    @property
    def port(self) -> int:
        return self._ports["--dashboard-port"]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        if not self._comes_up():
            self._fail()

    def _comes_up(self) -> bool:
        """Start the head. Return False if Ray gives up, which it does 30 s after a start that hangs."""
        site = self._home / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(_QUICK_SETUP)
        environment = {**_environment(), "PYTHONPATH": str(site)}
        with self._log.open("ab") as log:
            argv = [sys.executable, str(_WARDEN), *self._command()]
            self._warden = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        until = time.monotonic() + _UP_WITHIN_S
        while not self._is_up():
            if self._warden.poll() is not None or time.monotonic() > until:
                self._append_raylet_log()
                self.stop()
                return False
            time.sleep(0.05)
        return True

    def _append_raylet_log(self) -> None:
        with self._log.open("ab") as log:
            for path in sorted(self._home.glob("session_2*/logs/raylet.*")):
                log.write(f"\n{path.name}:\n".encode() + path.read_bytes()[-1500:])

    def _fail(self) -> NoReturn:
        pytest.fail(f"Ray did not come up:\n{self._log.read_text(errors='replace')[-5000:]}")

    def _command(self) -> Iterator[str]:
        yield from (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats")
        yield from ("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--temp-dir={self._home}")
        yield from (f"{name}={port}" for name, port in self._ports.items())
        # Each worker asks the system for its port.
        yield from ("--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=False")
        yield from (f"--num-cpus={CPUS}", f"--num-gpus={GPUS}", f"--object-store-memory={_LEAST_STORE_BYTES}")

    def _is_up(self) -> bool:
        """Return whether its node is registered and its agent accepts jobs."""
        try:
            return b'"ALIVE"' in _get(self.port, "/api/v0/nodes") and bool(
                _get(self._ports["--dashboard-agent-listen-port"], "/api/healthz")
            )
        except (OSError, http.client.HTTPException):
            return False

    @contextlib.contextmanager
    def second_node(self, gpus: int, *, hidden: Path | None = None) -> Iterator[None]:
        """Add a node for the time of the block, which sees an empty folder in place of `hidden`. Ray notices its end
        late: stop the cluster afterwards."""
        environment = {**_environment(), "PYTHONPATH": str(self._home / "site")}
        script = _SECOND_NODE.format(port=self._ports["--port"], cpus=CPUS, gpus=gpus, store=_LEAST_STORE_BYTES)
        node = [sys.executable, "-c", script]
        argv = [sys.executable, str(_WARDEN), *(node if hidden is None else hidden_from(hidden, *node))]
        with self._log.open("ab") as log:
            warden = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            until = time.monotonic() + _UP_WITHIN_S
            while _get(self.port, "/api/v0/nodes").count(b'"ALIVE"') < 2:
                assert warden.poll() is None, self._log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until, "the second node did not come up"
                time.sleep(0.1)
            yield
        finally:
            warden.communicate(timeout=_DOWN_WITHIN_S)

    def stop(self) -> None:
        """Kill all processes at once, as if the machine had crashed."""
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
            self._warden.wait(_DOWN_WITHIN_S)
            self._warden = None
        shutil.rmtree(self._home, ignore_errors=True)

    def crash(self) -> None:
        """Kill all processes but those that supervise jobs and their programs, as a head that crashes leaves them."""
        assert self._warden is not None
        left = self.processes()
        ours = {each.pid for each in left if any("node_supervisor" in word for word in _words(each)[:6])}
        spared = ours | {child.pid for each in left if each.pid in ours for child in each.children(recursive=True)}
        self._warden.kill()
        self._warden.communicate(timeout=_DOWN_WITHIN_S)
        self._warden = None
        for each in left:
            if each.pid not in spared:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        psutil.wait_procs([each for each in left if each.pid not in spared], _DOWN_WITHIN_S)
        shutil.rmtree(self._home, ignore_errors=True)

    def restart(self) -> None:
        """Start a new head at the same address, without the old one's jobs."""
        self.stop()
        self.start()

    def processes(self) -> list[psutil.Process]:
        """Return its own processes and those of its jobs."""
        return [] if self._warden is None else psutil.Process(self._warden.pid).children(recursive=True)

    def kill_actor_above(self, pid: int) -> None:
        """Kill Ray's supervisor of the job that process `pid` belongs to."""
        [actor] = [each for each in psutil.Process(pid).parents() if each.name().startswith("ray::JobSup")]
        actor.kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _environment() -> dict[str, str]:
    """Return an environment without coverage measurement and without the user's Ray settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "RAY_", "GPUYARD_"))}
    return {**kept, **_VARIABLES}


def _get(port: int, path: str) -> bytes:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()
