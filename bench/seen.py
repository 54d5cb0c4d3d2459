"""How long after a change it is seen: in a browser, and in `gpuyard top` in a terminal, both at once.

`python -m bench seen` needs Chromium, Playwright and tmux.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.yard import GPUYARD, Yard, yard
from gpuyard.connect.fast_http import DaemonConnection

_TIMES = 30
_WITHIN_S = 10.0


def bench_seen() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="gy", dir="/tmp") as folder, yard(Path(folder) / "home", "4x24GB") as ours:
        ours("submit", "--vram", "6G", "--array", "1-400", "--", "sleep", "2")  # something goes on all the time
        ours("submit", "--hold", "--priority", "-9", "--", "true")
        with sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(ours("web", "--port", "0").split()[0])
            terminal = _terminal(ours, folder)
            try:
                counts = page.locator("#counts")
                _measure(ours, lambda: counts.inner_text().lower().replace("\n", " "), lambda: _screen(terminal))
            finally:
                _tmux(terminal, "kill-server")
                browser.close()
        ours("cancel", "all")


def _measure(ours: Yard, page: Callable[[], str], terminal: Callable[[], str]) -> None:
    taken: dict[str, list[float]] = {"in the browser": [], "in the terminal": []}
    with DaemonConnection(str(ours.socket), may_start=False) as client:
        _await(lambda: "held 1" in page() and "1 held" in terminal())
        for number in range(_TIMES):
            is_held = number % 2 == 1
            client.request("POST", f"/jobs/{'hold' if is_held else 'release'}", body={"ids": "401"})
            began, left = time.perf_counter(), dict.fromkeys(taken)
            sees = {"in the browser": lambda: "held 1" in page(), "in the terminal": lambda: "1 held" in terminal()}
            while left:
                for face in [face for face in left if sees[face]() is is_held]:
                    taken[face].append(time.perf_counter() - began)
                    del left[face]
    for face, seconds in taken.items():
        middle, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"a change is seen {face:<16} {middle:6.0f} ms, at most {most:.0f} ms")


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("it is not seen at all")


def _terminal(ours: Yard, folder: str) -> dict[str, str]:
    env = {**ours.env, "TMUX_TMPDIR": folder, "TMUX": "", "LANG": "C.UTF-8"}
    _tmux(env, "new-session", "-d", "-s", "top", "-x", "120", "-y", "40", GPUYARD, "top")
    return env


def _screen(env: dict[str, str]) -> str:
    return _tmux(env, "capture-pane", "-p", "-t", "top")


def _tmux(env: dict[str, str], *words: str) -> str:
    done = subprocess.run(["tmux", "-u", *words], env=env, capture_output=True, text=True, check=False, cwd=os.sep)
    return done.stdout
