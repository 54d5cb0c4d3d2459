"""gflow (PyPI: runqd), with its own tmux server."""

import json
import os
import shlex
import shutil
import socket
import time

from bench.work import Tool, ToolFailed, Work, serving


def gflow_tool(install: str) -> Tool:
    return Tool(
        name="gflow (runqd), in tmux",
        run=_gflow,
        is_installed=lambda: shutil.which("gflowd") is not None and shutil.which("tmux") is not None,
        install=install,
        jobs=10,
        hand_overs=10,
        note="a snapshot every 30 s",
    )


def _gflow(work: Work) -> float:
    port = free_port()
    env = _home(work, port)
    with serving(["gflowd"], work, env):
        work.wait_until(lambda: is_listening(port), 0.05)
        # Without `command`, gflow would read a single argument that names a file as a script.
        job = ["command", *work.command]
        started = time.perf_counter()
        work.call(["gbatch", "--array", f"1-{work.count}", "--max-concurrent", str(work.slots), *job], env)
        work.wait_until(lambda: not {"Queued", "Running"} & set(_states(work, env)), 0.05)
        taken = time.perf_counter() - started
        if (finished := _states(work, env).count("Finished")) != work.count:
            raise ToolFailed(f"{finished} of {work.count} jobs finished")
        return taken


def _home(work: Work, port: int) -> dict[str, str]:
    config = work.folder / ".config/gflow/gflow.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[daemon]\nhost = "127.0.0.1"\nport = {port}\n')
    # A job reports its end with a gflow command, which tmux's login shell would not find.
    (work.folder / ".profile").write_text(f"PATH={shlex.quote(os.environ['PATH'])}\n")
    (work.folder / "run").mkdir(mode=0o700)
    return {
        "HOME": str(work.folder),
        "XDG_CONFIG_HOME": str(work.folder / ".config"),
        "XDG_DATA_HOME": str(work.folder / ".local/share"),
        "XDG_RUNTIME_DIR": str(work.folder / "run"),
        "TMUX_TMPDIR": str(work.folder / "run"),
        "TMUX": "",
    }


def _states(work: Work, env: dict[str, str]) -> list[str]:
    return [job["state"] for job in json.loads(work.call(["gqueue", "-a", "-o", "json"], env))["jobs"]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
