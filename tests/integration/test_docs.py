"""Run every example in the README and the docs: `console` blocks line by line (`> ` continues a line), `python` blocks
unchanged."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import connect
from gpuyard.client.paths import lock_path
from tests.integration.queue_fixture import Daemon, is_gone, until
from tests.integration.sim_view_fixture import quiet_daemon
from tests.residency_files import points, write_ply
from tests.unit.probes.samples_nvidia import XML

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# On a page with this comment each block continues where the last one ended. Separate tests run these pages as a whole:
# `test_workspace_tutorial.py` and `test_render_example.py`.
IN_ORDER = "<!-- blocks run in order -->"
EXAMPLES = [
    pytest.param(language, code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if IN_ORDER not in page.read_text()
    for number, (language, code) in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_works_as_it_is_written(
    language: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "scheduler.sh" in code:
        request.getfixturevalue("tmux")  # not the user's home
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "usage.csv").write_text("kind,utilization_percent\ndevice,50\n")
    (tmp_path / "saved.xml").write_text(XML)
    (tmp_path / "manifest.json").write_text('{"scene": "room.ply", "labels": ["front", "back"]}')
    (tmp_path / "mine.py").write_text("def render(scene, frames, label, out_dir): assert len(scene['x']) == 10\n")
    write_ply(tmp_path / "room.ply", points(10))
    if language == "python":
        command = [sys.executable, "-c", code]
    else:
        lines = [line[2:] for line in code.splitlines() if line.startswith(("$ ", "> "))]
        assert lines, "a console block shows what to type behind a $"
        command = ["sh", "-ec", "\n".join([*lines, "wait"])]
    with quiet_queue(code):
        subprocess.run(command, check=True, cwd=tmp_path, timeout=240, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def quiet_queue(code: str) -> Iterator[None]:
    """End the queue that an example starts. A batch waits while the CPU is busy with other tests: for such an example,
    start a daemon beforehand that does not see the load."""
    daemon = Daemon(quiet_daemon("cpu_percent")) if re.search("gpuyard (batch|datagen)", code) else None
    try:
        assert daemon is None or daemon.serves(), daemon.log
        yield
    finally:
        end_queue()
        if daemon is not None:
            daemon.wait()


def end_queue() -> None:
    """End the daemon if the example started one."""
    pid = running_pid(lock_path())
    if pid is not None:
        with contextlib.closing(connect(start=False)) as client:
            client.request("POST", "/jobs/cancel", body={"ids": "all"})
            while not client.request("GET", "/wait", {"ids": "all"})["done"]:
                pass
            client.request("POST", "/stop", body={})
        until(lambda: is_gone(pid), "the end of the daemon")


def test_the_reference_names_every_command_and_option() -> None:
    from gpuyard.ui.cli.verbs import VERBS, import_verb

    page = (ROOT / "docs/reference/commands.md").read_text()
    for verb in VERBS:
        assert f"gpuyard {verb}" in page
        for option in import_verb(verb).VERB.options:
            assert option.is_hidden or f"--{option.name}" in page, f"{verb} --{option.name}"
