import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeMissing, ProbeTimeout
from gpuyard.probes.run_tool import run_tool
from tests.in_time import wait_until_gone

Tools = Callable[[str, str], Path]
# A shell script starts well within the timeout of a tool, also on a slow machine.
SHELL = "#!/bin/sh\n"


def test_a_tool_gets_no_input_and_the_c_locale_and_what_it_prints_is_returned(tools: Tools) -> None:
    tools("smi", "import os, sys; print(repr(sys.stdin.read()), os.environ['LC_ALL'])")
    assert run_tool(["smi"], 10).stdout == "'' C\n"
    tools("smi", "import sys; print('figures'); print('a warning', file=sys.stderr)")
    output = run_tool(["smi"], 10)
    assert (output.stdout, output.stderr, output.status) == ("figures\n", "a warning\n", 0)
    assert output.require_success() == "figures\n"
    tools("smi", "import sys; sys.stdout.buffer.write(b'\\xff\\xfe ok')")
    assert run_tool(["smi"], 10).stdout.endswith(" ok")
    tools("smi", "print('figures')")
    run_tool(["smi"], 10)
    before = psutil.Process().num_fds()
    for _ in range(5):
        run_tool(["smi"], 10)
    assert psutil.Process().num_fds() == before


def test_a_tool_that_is_missing_or_not_permitted_is_named(tools: Tools) -> None:
    with pytest.raises(ProbeMissing, match="no-such-smi"):
        run_tool(["no-such-smi"], 1)
    tools("smi", "").chmod(0o644)
    with pytest.raises(ProbeDenied, match="is not executable"):
        run_tool(["smi"], 1)
    tools("smi", "import sys; sys.exit('Failed to open the PMU (Permission denied)')")
    with pytest.raises(ProbeDenied, match="PMU") as refusal:
        run_tool(["smi"], 10).require_success()
    assert refusal.value.hint == "run it as root"


@pytest.mark.parametrize("content", [b"#!/no/such/interpreter\n", b"\x7fELF nonsense"])
def test_a_file_that_cannot_be_run_is_a_crash(tools: Tools, content: bytes) -> None:
    tools("smi", "").write_bytes(content)
    with pytest.raises(ProbeCrashed, match="smi"):
        run_tool(["smi"], 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; print('card 0 is odd', file=sys.stderr); sys.exit(9)", "status 9: card 0 is odd"),
        ("import os; os.abort()", "signal 6"),
    ],
)
def test_the_last_output_or_the_signal_of_a_failed_tool_is_reported(tools: Tools, script: str, said: str) -> None:
    tools("smi", script)
    with pytest.raises(ProbeCrashed, match=said):
        run_tool(["smi"], 10).require_success()


@pytest.mark.linux("the program setsid")
@pytest.mark.needs("setsid")
def test_a_hanging_tool_is_killed_with_its_children_in_any_session(tools: Tools, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 600 & near=$!; setsid sleep 600 & echo $$ $near $! > {pids}; wait"
    tools("smi", f"{SHELL}{script}\n")
    started = time.monotonic()
    with pytest.raises(ProbeTimeout, match=r"no answer within 1\.5 s"):
        run_tool(["smi"], 1.5)
    assert time.monotonic() - started < 30
    family = [int(pid) for pid in pids.read_text().split()]
    assert len(family) == 3
    for pid in family:
        wait_until_gone(pid)


def test_a_child_that_keeps_the_pipe_open_does_not_block_the_reader(tools: Tools) -> None:
    tools("smi", "import subprocess; subprocess.Popen(['sleep', '600']); print('figures', flush=True)")
    assert run_tool(["smi"], 30).stdout == "figures\n"


def test_an_endless_tool_is_stopped_after_enough_output(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools("smi", "import itertools\nfor i in itertools.count(): print('sample', i, flush=True)")
    output = run_tool(["smi"], 30, enough=lambda so_far: so_far.count(b"\n") >= 2)
    assert output.stdout.startswith("sample 0\nsample 1\n")
    assert output.require_success() == output.stdout
    monkeypatch.setattr("gpuyard.probes.run_tool.MAX_OUTPUT_BYTES", 100_000)
    tools("smi", "while True: print('x' * 10_000)")
    assert len(run_tool(["smi"], 30).stdout) < 1_000_000


def test_a_tool_that_cannot_be_killed_starts_once(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    tools("stubborn-smi", f"{SHELL}echo x >> {starts}; exec sleep 600\n")
    with monkeypatch.context() as powerless:
        powerless.setattr("gpuyard.probes.run_tool.os.killpg", lambda *_: None)
        powerless.setattr("gpuyard.probes.run_tool._kill_descendants", lambda *_: None)
        with pytest.raises(ProbeTimeout, match="no answer"):
            run_tool(["stubborn-smi"], 1)
    with pytest.raises(ProbeTimeout, match=r"process \d+ of an earlier call hangs") as refusal:
        run_tool(["stubborn-smi"], 1)
    assert starts.read_text() == "x\n"
    stuck = psutil.Process(int(refusal.value.message.split()[1]))
    stuck.kill()
    tools("stubborn-smi", f"{SHELL}echo x >> {starts}\n")
    wait_until_gone(stuck.pid)
    assert run_tool(["stubborn-smi"], 10).status == 0
