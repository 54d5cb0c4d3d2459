"""`gpuyard batch` and `gpuyard datagen` with the daemon that they start, and real runs."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import running_pid
from tests.fakes.queue_command import run, run_here
from tests.integration.batch_fixture import GATED, OPEN, batch, let_go, queue, summary_in  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("queue")


# Dry runs


def test_a_dry_run_prints_the_commands_and_creates_and_starts_nothing(own_home: Path) -> None:
    command = ("--seed", "7", "--output-root", "out", "--", "no such program", "{index}", "-s{seed}", "{output}", "{x}")
    result = run("batch", "--count", "2", "--dry-run", *command)
    out = own_home.parent / "out"
    assert result.stdout.splitlines() == [
        f"'no such program' 0 -s7 {out}/run-000000 '{{x}}'",
        f"'no such program' 1 -s8 {out}/run-000001 '{{x}}'",
    ]
    assert (result.returncode, result.stderr) == (0, "")
    assert not out.exists()
    assert running_pid(own_home / "daemon.lock") is None


def test_datagen_passes_the_simulator_its_own_options(own_home: Path) -> None:
    folder = own_home.parent

    def commands(*arguments: str) -> list[str]:
        result = run("datagen", "--dry-run", *arguments)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.splitlines()

    prune = f"--prune-empty --prune-output-root {folder}/out-pruned"
    whole = f"sim_view --mode datagen --headless {prune} --output-root {folder}/out/run-00000"
    assert commands("--count", "2") == [f"{whole}0 --seed 0", f"{whole}1 --seed 1"]
    least = ("--count", "1", "--seed", "9", "--no-headless", "--no-prune", "--program", "./sim", "--output-root", "/d")
    assert commands(*least) == ["./sim --mode datagen --output-root /d/run-000000 --seed 9"]
    ours = ("--count", "1", "--prune-with", "scheduler", "--prune-output-root", "p", "--max-frames", "5")
    passed_on = "--max-frames 5 --scene 'a b' --seed-of 0"
    assert commands(*ours, "--", "--scene", "a b", "--seed-of", "{seed}") == [
        f"sim_view --mode datagen --headless --output-root {folder}/out/run-000000 --seed 0 {passed_on}"
    ]
    own_root = commands("--count", "1", "--prune-output-root", "empty")[0]
    assert f"--prune-empty --prune-output-root {folder}/empty --output-root" in own_root


def test_datagen_proposes_limits_by_a_log_and_starts_nothing(own_home: Path) -> None:
    assert run("watch", "--count", "2", "--interval", "100ms", "--log", "usage.csv").returncode == 0
    result = run("datagen", "--calibrate", "usage.csv")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split("  # ") for line in result.stdout.splitlines()]
    options = [option.split()[0] for option, _ in lines]
    assert options == ["--max-cpu", "--min-free-mem-mb", "--max-gpu", "--max-gpu-mem-mb"]
    assert all("in 95% of 2 samples" in why for _, why in lines)
    assert running_pid(own_home / "daemon.lock") is None
    assert run("datagen", "--count", "1", "--dry-run", *" ".join(option for option, _ in lines).split()).returncode == 0


# Whole batches


def test_a_batch_runs_each_command_once_and_prints_a_summary(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = "echo {index} {seed} > {output}/data; echo frames: 4"
    result = batch(5, "--concurrency", "3", "--seed", "40", "--output-root", "out", program=program)
    assert result.returncode == 0, result.stderr
    first, _, frames, files = result.stdout.splitlines()
    assert first.startswith("sh: all 5 runs succeeded, in ")
    assert (frames.split(), files.split()) == (["frames", "20"], ["files", str(out)])
    written = [(out / f"run-{index:06d}" / "data").read_text() for index in range(5)]
    assert written == [f"{index} {40 + index}\n" for index in range(5)]
    summary = summary_in(out)
    assert (summary["runs"], summary["succeeded"], summary["attempts"], summary["frames"]) == (5, 5, 5, 20)


def test_a_failed_run_is_retried_with_its_seed_then_reported_in_the_exit_status(tmp_path: Path) -> None:
    program = "echo {seed} >> seeds; [ {index} != 1 ] || exit 3"
    typed = ("--retries", "2", "--seed", "5", "--output-root", "out", "--name", "night")
    result = batch(3, *typed, program=program)
    assert result.returncode == 1
    assert sorted((tmp_path / "seeds").read_text().split()) == ["5", "6", "6", "6", "7"]
    assert "night: 2 of 3 runs succeeded, 1 failed, in " in result.stdout
    failed = next(line for line in result.stdout.splitlines() if line.startswith("  failed"))
    assert failed.split()[1:7] == ["run", "1,", "seed", "6:", "exit", "status"]
    assert Path(failed.split()[-1]).is_file()
    assert "gpuyard batch --resume --count 3 " in result.stderr.splitlines()[-1]
    again = batch(3, *typed, "--json", program=program)
    summary = json.loads(again.stdout)
    assert (again.returncode, summary) == (1, summary_in(tmp_path / "out"))
    assert (summary["name"], summary["failures"][0]["index"]) == ("night", 1)
    assert summary["failures"][0]["reason"] == "exit status 3"


def test_without_an_output_root_a_run_gets_a_folder_of_gpuyard(own_home: Path) -> None:
    result = batch(1, program="pwd; echo {output}")
    assert result.returncode == 0
    assert run("logs", "1").stdout.splitlines()[0] == str(own_home.parent)
    assert run("logs", "1").stdout.splitlines()[1].startswith(f"{own_home}/batches/sh-")


def test_empty_runs_are_pruned_by_gpuyard(tmp_path: Path) -> None:
    program = "echo log > {output}/log.txt; [ {index} = 1 ] || echo data > {output}/1.png"
    pruning = ("--output-root", "out", "--prune-output-root", "empty", "--frames", "*.png")
    result = batch(3, *pruning, program=program)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("*/run-*")) == ["run-000000", "run-000001", "run-000002"]
    assert (tmp_path / "empty/run-000001/log.txt").read_text() == "log\n"
    assert f"pruned  1 run without a frame, in {tmp_path}/empty\n" in result.stdout
    moved = json.loads((tmp_path / "out/pruned.jsonl").read_text().splitlines()[-1])
    assert (moved["run"], moved["to"]) == ("run-000001", f"{tmp_path}/empty/run-000001")


SIMULATOR = """
import os, sys
options = dict(zip(sys.argv, sys.argv[1:]))
root, seed = options['--output-root'], int(options['--seed'])
if seed % 2:
    os.makedirs(options['--prune-output-root'], exist_ok=True)
    os.rename(root, os.path.join(options['--prune-output-root'], f'seed-{seed}'))
else:
    open(os.path.join(root, 'frame'), 'w').write('x' * int(options['--max-frames']))
    print(options['--max-frames'], 'frames')
"""


def test_datagen_works_with_a_simulator_that_prunes_by_itself(
    tmp_path: Path, tools: Callable[[str, str], Path]
) -> None:
    tools("sim_view", SIMULATOR)
    result = run("datagen", "--count", "4", "--max-frames", "3", *OPEN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("datagen: all 4 runs succeeded, in ")
    assert sorted(path.parent.name for path in tmp_path.glob("out/*/frame")) == ["run-000000", "run-000002"]
    assert sorted(path.name for path in tmp_path.glob("out-pruned/[!.]*")) == ["seed-1", "seed-3"]
    summary = summary_in(tmp_path / "out")
    assert (summary["pruned"], summary["frames"]) == (2, 6)


# Continuing a batch


def test_resume_runs_only_what_has_not_succeeded(tmp_path: Path) -> None:
    program = "echo {index} >> done; [ {index} != 1 ] || [ -e mended ]"
    root = ("--output-root", "out")
    assert batch(3, *root, program=program).returncode == 1
    (tmp_path / "mended").touch()
    resumed = batch(3, *root, "--resume", program=program)
    assert resumed.returncode == 0
    assert resumed.stderr.startswith("gpuyard: continuing with 1 of 3 runs\n")
    assert resumed.stdout.startswith("sh: all 3 runs succeeded")
    nothing_left = batch(3, *root, "--resume", program=program)
    assert (nothing_left.returncode, nothing_left.stdout) == (0, resumed.stdout)
    more = batch(4, *root, "--resume", program=program)
    assert (more.returncode, more.stdout.startswith("sh: all 4 runs succeeded")) == (0, True)
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1", "1", "2", "3"]
    other = batch(4, *root, "--resume", "--seed", "1", program=program)
    assert (other.returncode, "started with another seed: 0, not 1" in other.stderr) == (2, True)


def test_the_same_command_continues_an_unfinished_batch_and_begins_another_after_a_finished_one(tmp_path: Path) -> None:
    program = "echo {output} >> done; [ {index} != 1 ] || [ -e mended ] && echo > {output}/frame"
    typed = ("--output-root", "out", "--prune-output-root", "empty")
    assert batch(3, *typed, program=program).returncode == 1
    (tmp_path / "mended").touch()
    again = batch(3, *typed, program=program)
    assert again.returncode == 0, again.stderr
    notice = f"gpuyard: the batch in {tmp_path}/out is unfinished: continuing with 1 of 3 runs\n"
    assert again.stderr.startswith(notice)
    other = batch(3, *typed, program=program)
    beside = f"gpuyard: the batch in {tmp_path}/out is finished (--append adds runs to it); starting a new one in "
    assert other.stderr.startswith(f"{beside}{tmp_path}/out-2\n")
    assert (other.returncode, summary_in(tmp_path / "out-2")["succeeded"]) == (0, 3)
    assert batch(3, *typed, program=program).stderr.startswith(f"{beside}{tmp_path}/out-3\n")
    ran = [Path(line) for line in (tmp_path / "done").read_text().splitlines()]
    assert [sum(each.parent.name == root for each in ran) for root in ("out", "out-2", "out-3")] == [4, 3, 3]
    assert {each.name for each in tmp_path.glob("empty*")} == {"empty", "empty-2", "empty-3"}


def test_a_batch_of_another_command_is_left_alone(tmp_path: Path) -> None:
    assert batch(1, "--output-root", "out", program="false").returncode == 1
    other = batch(1, "--output-root", "out", program="true")
    assert other.returncode == 0
    reason = f"gpuyard: the batch in {tmp_path}/out was started with another command"
    assert other.stderr.startswith(f"{reason}; starting a new one in {tmp_path}/out-2\n")
    assert summary_in(tmp_path / "out")["succeeded"] == 0
    dry = batch(1, "--output-root", "out", "--dry-run", program="true")
    assert (dry.returncode, f"starting a new one in {tmp_path}/out-3\n" in dry.stderr) == (0, True)


def test_append_adds_runs_with_the_next_seeds_once_the_batch_is_finished(tmp_path: Path) -> None:
    program = "echo {seed} >> seeds; [ {index} != 3 ] || [ -e mended ]"
    typed = ("--append", "--seed", "5", "--output-root", "out")
    assert batch(2, *typed, program=program).returncode == 0
    added = batch(2, *typed, program=program)
    assert added.returncode == 1
    notice = f"gpuyard: adds seeds 7 to 8 to the batch in {tmp_path}/out: continuing with 2 of 4 runs\n"
    assert added.stderr.startswith(notice)
    assert "--append" not in added.stderr.splitlines()[-1]
    (tmp_path / "mended").touch()
    again = batch(2, *typed, program=program)
    unfinished = (
        f"gpuyard: the batch in {tmp_path}/out is unfinished, so nothing is added: continuing with 1 of 4 runs\n"
    )
    assert (again.returncode, again.stderr.startswith(unfinished)) == (0, True)
    assert (tmp_path / "seeds").read_text().split() == ["5", "6", "7", "8", "8"]
    assert summary_in(tmp_path / "out")["runs"] == 4


def test_the_resume_hint_of_a_batch_beside_another_names_its_root(tmp_path: Path) -> None:
    assert batch(1, "--output-root", "out", program="true").returncode == 0
    os.mkfifo(tmp_path / "gate")
    begun = batch(1, "--detach", "--output-root=out", program="read word < gate")
    resume_hint = begun.stderr.splitlines()[-1].strip()
    assert resume_hint.startswith(f"gpuyard batch --resume --output-root {tmp_path}/out-2 --count 1 ")
    assert "--output-root=out" not in resume_hint
    (tmp_path / "gate").write_text("go\n")
    followed = run(*shlex.split(resume_hint)[1:])
    assert (followed.returncode, followed.stdout.startswith("sh: the run succeeded")) == (0, True)


def test_a_detached_batch_runs_in_the_queue_and_can_be_followed_later(tmp_path: Path) -> None:
    begun = batch(2, "--detach", "--output-root", "out", program=GATED)
    assert (begun.returncode, begun.stdout) == (0, "1-2\n")
    resume_hint = begun.stderr.splitlines()[-1]
    assert resume_hint.startswith("  gpuyard batch --resume --count 2 ")
    assert "--detach" not in resume_hint
    followed = batch(2, "--detach", "--resume", "--json", "--output-root", "out", "--concurrency", "2", program=GATED)
    assert json.loads(followed.stdout) == {
        "name": "sh", "ids": "1-2", "first": 1, "last": 2, "finish": 3, "root": str(tmp_path / "out"),
    }  # fmt: skip
    assert "keep the limits they were submitted with" in followed.stderr
    let_go(tmp_path, 0, 1)
    assert batch(2, "--resume", "--output-root", "out", program=GATED).returncode == 0


def test_a_batch_that_the_queue_has_forgotten_is_reported_from_its_summary(tmp_path: Path) -> None:
    program = "true"
    done = batch(1, "--output-root", "out", program=program)
    assert done.returncode == 0
    assert run("clean", "--older-than", "0s").returncode == 0
    again = batch(1, "--resume", "--output-root", "out", program=program)
    assert (again.returncode, again.stdout) == (0, done.stdout)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch", "--", "true"], "how many runs?"),
        (["batch", "--count", "3"], "no program given"),
        (["batch", "--count", "0", "--", "true"], "--count 0 is out of range"),
        (["batch", "--count", "200000", "--", "true"], "200,000 runs are too many"),
        (["batch", "--count", "1", "--max-cpu", "101", "--", "true"], "--max-cpu 101 is out of range"),
        (["batch", "--count", "1", "--min-free-mem-mb", "-1", "--", "true"], "--min-free-mem-mb -1 is out of range"),
        (["batch", "--count", "1", "--run-vram", "0", "--", "true"], "--run-vram 0 is out of range"),
        (["batch", "--count", "1", "--run-vram", "9G", "--max-gpu-mem-mb", "8000", "--", "true"], "9216 MB"),
        (["batch", "--count", "1", "--run-vram", "9G", "--gpus", "0", "--", "true"], "--gpus 0 asks for no GPU"),
        (["batch", "--count", "1", "--device", ",", "--", "true"], "--device names no GPU"),
        (["batch", "--count", "1", "--name", "a b", "--", "true"], "--name 'a b' is not one plain word"),
        (["batch", "--count", "1", "--frames", "*.png", "--", "true"], "--frames needs --prune-output-root"),
        (["batch", "--count", "1", "--output-root", "", "--", "true"], "a path is empty"),
        (["batch", "--count", "1", "--resume", "--", "true"], "--resume: which batch?"),
        (["batch", "--count", "1", "--resume", "--output-root", "none", "--", "true"], "there is no batch in "),
        (["batch", "--count", "1", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["batch", "--count", "1", "--", "echo", os.fsdecode(b"\xff")], "is not UTF-8"),
        (["datagen", "--count", "1", "--append", "--resume"], "--resume and --append exclude each other"),
        (["datagen", "--count", "1"], "there is no program 'sim_view'\n  give a program on PATH"),
        (["batch", "--count", "1", "--", "/etc/passwd"], "'/etc/passwd' is not executable"),
        (
            ["datagen", "--count", "1", "--no-prune", "--prune-keeps", "here"],
            "--prune-keeps needs --prune-with program",
        ),
        (["datagen", "--count", "1", "--frames", "*.png"], "add --prune-with scheduler"),
        (["datagen", "--count", "1", "--program", "true", "--prune-output-root", "out/x"], "inside the output root"),
    ],
)
def test_a_usage_error_names_the_remedy_before_anything_starts(
    own_home: Path, arguments: list[str], message: str
) -> None:
    result = run_here(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("gpuyard: ")
    assert "\n  " in result.stderr, "it has a hint"
    assert running_pid(own_home / "daemon.lock") is None


def test_a_program_of_the_current_folder_is_not_started_by_its_bare_name(own_home: Path) -> None:
    program = own_home.parent / "sim_view"
    program.touch()
    refused = run("datagen", "--count", "1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        "'sim_view' on PATH, but there is one in the current folder\n  `chmod +x sim_view`, and write" in refused.stderr
    )
    program.chmod(0o755)
    assert "\n  write it as ./sim_view; for datagen: --program ./sim_view\n" in run("datagen", "--count", "1").stderr
    assert running_pid(own_home / "daemon.lock") is None


def test_a_batch_refused_by_the_queue_leaves_the_output_root_unchanged(tmp_path: Path) -> None:
    command = ("batch", "--count", "2", "--max-cpu", "100", "--min-free-mem-mb", "0", "--output-root", "out")
    refused = run(*command, "--device", "7", "--", "true")
    assert (refused.returncode, "there is no GPU '7'" in refused.stderr) == (2, True)
    assert list((tmp_path / "out").iterdir()) == []
    assert run(*command, "--device", "1", "--", "true").returncode == 0
