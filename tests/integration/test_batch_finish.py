"""The end of a batch: its summary is correct, also when a batch was continued."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.fakes.queue_command import run
from tests.integration.batch_fixture import OPEN, batch, queue, summary_in  # noqa: F401 - a fixture
from tests.integration.queue_fixture import until

pytestmark = pytest.mark.usefixtures("queue")
unmeasured = pytest.mark.usefixtures("unmeasured")
ROOTS = ("--output-root", "out", "--prune-output-root", "pruned")


# A simulator that moves the runs it keeps, and leaves the empty ones.
KEEPS_THERE = """
import os, sys
options = dict(zip(sys.argv, sys.argv[1:]))
if options['--seed'] != '1':
    open(os.path.join(options['--output-root'], 'frame'), 'w').write('data')
    os.rename(options['--output-root'], os.path.join(options['--prune-output-root'], f"seed-{options['--seed']}"))
print('frames:', int(options['--seed'] != '1'))
"""


# A simulator that waits for the test, and prunes all its runs.
PRUNES_ALL = """
import os, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
while not os.path.exists('go'):
    time.sleep(0.02)
out = options['--output-root']
open(os.path.join(out, 'log'), 'w').write(out)
os.rename(out, os.path.join(options['--prune-output-root'], os.path.basename(out)))
print('frames: 0')
"""


def runs_in(root: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (root / "runs.jsonl").read_text().splitlines()]


def test_a_pruned_run_that_later_produced_data_is_not_reported_as_pruned(tmp_path: Path) -> None:
    program = "test -e ready && echo data > {output}/frame"
    assert batch(2, *ROOTS, program=program).returncode == 1
    assert summary_in(tmp_path / "out")["pruned"] == 2
    (tmp_path / "ready").touch()
    assert batch(2, *ROOTS, "--resume", program=program).returncode == 0
    assert summary_in(tmp_path / "out")["pruned"] == 0
    assert [run["pruned_to"] for run in runs_in(tmp_path / "out")] == [None, None]
    assert (tmp_path / "out/run-000001/frame").read_text() == "data\n"


def test_data_in_the_simulators_prune_root_is_kept(tmp_path: Path, tools: Callable[[str, str], Path]) -> None:
    tools("sim_view", KEEPS_THERE)
    result = run("datagen", "--count", "4", *OPEN)
    assert result.returncode == 0, result.stderr
    summary = summary_in(tmp_path / "out")
    assert (summary["kept"], summary["pruned"], summary["left"]) == (3, 1, [])
    assert f"  kept    3 runs with data, in {tmp_path}/out-pruned\n  pruned  1 run without a frame\n" in result.stdout
    here = run("datagen", "--count", "4", *OPEN, "--prune-keeps", "here")
    assert f"  kept        0 runs with data, in {tmp_path}/out-2\n" in here.stdout


def test_batches_that_run_at_once_with_one_prune_root_number_their_runs_apart(
    tmp_path: Path, tools: Callable[[str, str], Path]
) -> None:
    tools("sim_view", PRUNES_ALL)
    shared = ("--prune-output-root", "empty", *OPEN)
    assert run("datagen", "--count", "2", "--detach", "--output-root", "a", *shared).returncode == 0
    other = run("datagen", "--count", "2", "--detach", "--output-root", "b", *shared)
    notice = f"gpuyard: {tmp_path}/empty has runs of another batch, so those of this one are numbered from 100000\n"
    assert other.stderr.startswith(notice)
    (tmp_path / "go").touch()
    assert run("wait", "all").returncode == 0
    added = run("datagen", "--count", "1", "--append", "--output-root", "a", *shared)
    assert added.returncode == 0, added.stdout
    logs = {path.parent.name: path.read_text() for path in tmp_path.glob("empty/*/log")}
    names = {"a": ("run-000000", "run-000001", "run-000002"), "b": ("run-100000", "run-100001")}
    assert logs == {name: f"{tmp_path}/{root}/{name}" for root in names for name in names[root]}
    assert [summary_in(tmp_path / root)["pruned"] for root in names] == [3, 2]


def test_a_dry_run_numbers_runs_apart_from_those_in_a_shared_prune_root(tmp_path: Path) -> None:
    command = ("datagen", "--count", "1", "--program", "true", "--prune-output-root", "empty")
    assert run(*command, "--device", "7").returncode == 2
    assert f"{tmp_path}/out/run-000000" in run(*command, "--dry-run").stdout
    (tmp_path / "empty/run-000007").mkdir(parents=True)
    assert f"--output-root {tmp_path}/out/run-100000 --seed 0" in run(*command, "--dry-run").stdout


@unmeasured
def test_runs_retried_by_hand_update_the_summary(tmp_path: Path) -> None:
    program = "test {index} != 1 || test -e ready"
    assert batch(3, "--output-root", "out", program=program).returncode == 1
    (tmp_path / "ready").touch()
    assert run("retry", "2").returncode == 0
    assert run("wait", "2").returncode == 0
    result = batch(3, "--output-root", "out", "--resume", program=program)
    assert result.returncode == 0, result.stdout
    assert summary_in(tmp_path / "out")["succeeded"] == 3


@unmeasured
def test_a_run_that_could_not_be_pruned_is_pruned_when_the_batch_continues(tmp_path: Path) -> None:
    assert batch(1, *ROOTS, program="rm -r pruned").returncode == 0
    assert "missing" in summary_in(tmp_path / "out")["left"][0]["why"]
    assert batch(1, *ROOTS, "--resume", program="rm -r pruned").returncode == 0
    assert (summary_in(tmp_path / "out")["pruned"], summary_in(tmp_path / "out")["left"]) == (1, [])
    assert (tmp_path / "pruned/run-000000").is_dir()


@unmeasured
def test_a_retried_run_gets_its_folder_again_and_its_duration_includes_all_attempts(tmp_path: Path) -> None:
    once = "touch once; rmdir {output}; sleep 0.5; false"
    program = f"if test -e once; then echo data > {{output}}/frame; else {once}; fi"
    result = batch(1, "--output-root", "out", "--retries", "1", program=program)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "out/run-000000/frame").exists()
    assert summary_in(tmp_path / "out")["seconds"] > 1.0  # half a second, and a delay of one second before the retry


def test_a_run_that_never_started_has_no_folder(tmp_path: Path) -> None:
    batch(3, "--detach", "--output-root", "out", program="echo > {output}/f; exec sleep 3600")
    until((tmp_path / "out/run-000000/f").exists, "the first run")
    assert run("cancel", "1-3").returncode == 0
    run("wait", "4")
    assert summary_in(tmp_path / "out")["cancelled"] == 3
    assert [each.name for each in (tmp_path / "out").glob("run-*")] == ["run-000000"]


def test_braces_in_a_root_are_a_part_of_its_name(tmp_path: Path) -> None:
    script = '#!/bin/sh\nwhile [ "$1" != --prune-output-root ]; do shift; done\necho "$2" >> roots\n'
    write_executable(tmp_path / "sim", script)
    roots = ("--output-root", "o{seed}", "--prune-output-root", "p{index}")
    assert run("datagen", "--count", "2", *OPEN, "--program", "./sim", *roots).returncode == 0
    assert (tmp_path / "roots").read_text() == f"{tmp_path}/p{{index}}\n" * 2


@unmeasured
def test_an_interrupt_while_submitting_still_submits_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gpuyard.recipes.batch import plan as recipe
    from gpuyard.ui.cli.command_grammar import run_verb
    from gpuyard.ui.cli.verbs import import_verb

    real = recipe._post

    def interrupted(*given: object, **more: object) -> object:
        monkeypatch.setattr(recipe, "_post", real)
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(recipe, "_post", interrupted)
    monkeypatch.setattr("sys.argv", ["gpuyard", "batch", "--count", "2"])
    options = ["--count", "2", *OPEN, "--output-root", str(tmp_path / "out"), "--", "true"]
    assert run_verb("batch", import_verb("batch"), options) == 130
    assert "the batch continues in the queue as jobs 1-2" in capfd.readouterr().err
    assert run("wait", "1-3").returncode == 0
    assert summary_in(tmp_path / "out")["succeeded"] == 2


def test_a_program_that_uses_no_gpu_is_learned_to_need_none(tmp_path: Path) -> None:
    gates = ("--max-cpu", "100", "--min-free-mem-mb", "0", "--steady", "0")
    # Each run stays until another runs beside it, or until it was sampled often enough for an estimate.
    company = "$(($(grep -c begins journal) - $(grep -c ends journal)))"
    stay = f"for tick in $(seq 60); do [ {company} -le 2 ] || break; sleep 0.05; done"
    program = f"echo begins >> journal; {stay}; echo ends >> journal"
    command = ("--count", "8", "--concurrency", "8", *gates, "--output-root", "out", "--", "sh", "-c", program)
    assert run("batch", *command).returncode == 0
    at_once = most = 0
    for word in (tmp_path / "journal").read_text().split():
        at_once += 1 if word == "begins" else -1
        most = max(most, at_once)
    assert most > 2, "no more at once than there are GPUs"
