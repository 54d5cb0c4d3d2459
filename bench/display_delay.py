"""Delay until a change is shown in a browser, and in `gpuyard top` in a terminal, both at once.

`python -m bench delay` needs Chromium, Playwright and tmux.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.private_gpuyard import GPUYARD, PrivateGpuyard, private_gpuyard
from gpuyard.client.fast_http import DaemonConnection

_TIMES = 30
_WITHIN_S = 10.0


def bench_delay() -> None:
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory(prefix="gy", dir="/tmp") as folder,
        private_gpuyard(Path(folder) / "home", "4x24GB") as gpuyard,
    ):
        gpuyard("submit", "--vram", "6G", "--array", "1-400", "--", "sleep", "2")  # keeps the queue changing
        gpuyard("submit", "--hold", "--priority", "-9", "--", "true")
        with sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(gpuyard("web", "--port", "0").split()[0])
            terminal = _terminal(gpuyard, folder)
            try:
                counts = page.locator("#counts")
                _measure(gpuyard, lambda: counts.inner_text().lower().replace("\n", " "), lambda: _screen(terminal))
            finally:
                _tmux(terminal, "kill-server")
                browser.close()
        gpuyard("cancel", "all")


def _measure(gpuyard: PrivateGpuyard, page: Callable[[], str], terminal: Callable[[], str]) -> None:
    taken: dict[str, list[float]] = {"in the browser": [], "in the terminal": []}
    with DaemonConnection(str(gpuyard.socket), may_start=False) as client:
        _await(lambda: "held 1" in page() and "1 held" in terminal())
        for number in range(_TIMES):
            is_held = number % 2 == 1
            client.request("POST", f"/jobs/{'hold' if is_held else 'release'}", body={"ids": "401"})
            began, left = time.perf_counter(), dict.fromkeys(taken)
            is_shown = {"in the browser": lambda: "held 1" in page(), "in the terminal": lambda: "1 held" in terminal()}
            while left:
                for display in [display for display in left if is_shown[display]() is is_held]:
                    taken[display].append(time.perf_counter() - began)
                    del left[display]
    for display, seconds in taken.items():
        median, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"a change is shown {display:<16} after {median:6.0f} ms, at most {most:.0f} ms")


def _await(is_shown: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not is_shown():
        if time.monotonic() > deadline:
            raise SystemExit(f"not shown within {_WITHIN_S:.0f} s")


def _terminal(gpuyard: PrivateGpuyard, folder: str) -> dict[str, str]:
    env = {**gpuyard.env, "TMUX_TMPDIR": folder, "TMUX": "", "LANG": "C.UTF-8"}
    _tmux(env, "new-session", "-d", "-s", "top", "-x", "120", "-y", "40", GPUYARD, "top")
    return env


def _screen(env: dict[str, str]) -> str:
    return _tmux(env, "capture-pane", "-p", "-t", "top")


def _tmux(env: dict[str, str], *arguments: str) -> str:
    command = ["tmux", "-u", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=os.sep).stdout
