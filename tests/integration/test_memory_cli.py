"""Memory on the command line: learned from the first run, packed for the next, retried after OOM, and forgotten."""

import getpass
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import gated_job
from tests.fakes.queue_command import GPUYARD, run, run_here, run_on_terminal
from tests.fakes.queue_standin import StandIn, attempt, job
from tests.integration.queue_fixture import QueueUnderTest, until

SIM_JOB = shlex.join([*GPUYARD, "sim-job"])
GATED_JOB = shlex.join(gated_job.COMMAND)


@pytest.fixture
def card(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    """A queue with a single GPU, on which a first run is alone."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text('[packing]\nfirst_run = "alone"\n')
    own_queue.start()
    return own_queue


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The gate of a gated job, in the directory that jobs are submitted from."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "gate"


def submit(*arguments: str) -> int:
    result = run_here("submit", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return int(result.stdout)


def submit_shell(script: str, *options: str) -> int:
    return submit(*options, "--", "sh", "-c", script)


def show(job_id: int) -> str:
    return run_here("show", str(job_id)).stdout


def has_been_seen_with(queue: QueueUnderTest, job_id: int, megabytes: float) -> bool:
    attempts = queue.job(job_id)["attempts"]
    return bool(attempts) and max(attempts[-1]["peaks_mb"].values(), default=0) >= megabytes


def finish_when_seen(queue: QueueUnderTest, job_id: int, megabytes: float, gate: Path) -> None:
    """Let the job end after a sample has seen its memory: an unsampled job yields no estimate."""
    until(lambda: has_been_seen_with(queue, job_id, megabytes), f"what job {job_id} holds")
    gate.touch()
    queue.wait(job_id)
    gate.unlink()


def test_the_first_run_gets_a_whole_gpu_and_later_runs_share_by_its_estimate(card: QueueUnderTest, gate: Path) -> None:
    script = f"{GATED_JOB} --vram 4096 --load 30 {gate.name}; true"
    first = submit_shell(script)
    until(lambda: has_been_seen_with(card, first, 4096), "what the first run holds")
    assert "memory: alone until it has shown what it needs (no estimate yet)\n" in show(first)
    assert " alone " in run_here("queue").stdout.splitlines()[2]
    finish_when_seen(card, first, 4096, gate)
    second, third = submit_shell(script, "--hold"), submit_shell(script)
    assert "  x1   4.5 GB " in run_here("queue", str(second)).stdout
    card.post("/jobs/release", ids=str(second))
    card.until_state(second, "running")
    card.until_state(third, "running")
    shown = show(third)
    assert "memory: learned 4.5 GB (from 1 run)\n" in shown
    assert "attempt 1: reserved 4.5 GB, predicted 4.5 GB" in shown
    gate.touch()
    card.wait(f"{second} {third}")
    assert re.search(r"^attempt 1: alone, peak 4 GB,.* load 30%(,|$)", show(first), re.MULTILINE)


def test_an_out_of_memory_job_reports_what_it_lacked_and_is_retried_with_more(
    card: QueueUnderTest,
) -> None:
    neighbour = submit("--vram", "18G", "--", *GPUYARD, "sim-job", "--vram", "18G", "--seconds", "3600")
    until(lambda: has_been_seen_with(card, neighbour, 18432), "what the neighbour holds")
    short = submit_shell(
        f"echo count $GPUYARD_OOM_COUNT; {SIM_JOB} --vram 3G --then 8G@600ms --seconds 1", "--vram", "4G"
    )
    until(lambda: [one["outcome"] for one in card.job(short)["attempts"]] == ["out-of-memory"], "its first end")
    shown = show(short)
    assert "memory: 13.8 GB (it ran out of memory once)\n" in shown
    assert "  out of memory: needed 11 GB, had 6 GB\n" in shown
    assert "    this job: held 3 GB, requested 8 GB more\n    GPU: 3 GB free, 24 GB in total\n" in shown
    assert f"job {neighbour} of {getpass.getuser()} 18 GB\n" in shown
    assert "    next: retry with 13.8 GB\n" in shown
    assert "Tried to allocate 8.00 GiB" in shown
    until(lambda: card.state(short) == "queued", "its turn")
    assert "13.8 GB needed" in run_here("why", "-v", str(short)).stdout
    card.post("/jobs/cancel", ids=str(neighbour))
    assert run_here("wait", str(short)).returncode == 0
    healed = card.job(short)
    assert [one["outcome"] for one in healed["attempts"]] == ["out-of-memory", "succeeded"]
    assert (healed["failures"], healed["attempts"][1]["reserved_mb"]) == (0, 1.25 * 11264)
    assert [card.log_of(short, number).splitlines()[0] for number in (1, 2)] == ["count 0", "count 1"]
    assert "next:" not in show(short)


def test_a_script_may_use_less_on_an_oom_retry_which_does_not_use_up_its_retries(card: QueueUnderTest) -> None:
    script = (
        'batch=$((40 >> GPUYARD_OOM_COUNT)); echo "batch $batch"; [ $GPUYARD_ATTEMPT != 2 ] || exit 3; '
        f"{SIM_JOB} --vram ${{batch}}G --seconds 0"
    )
    job_id = submit_shell(script, "--retries", "1")
    assert run_here("wait", str(job_id)).returncode == 0
    healed = card.job(job_id)
    assert [one["outcome"] for one in healed["attempts"]] == ["out-of-memory", "failed", "succeeded"]
    assert [card.log_of(job_id, number).splitlines()[0] for number in (1, 2, 3)] == ["batch 40", "batch 20", "batch 20"]
    assert "retries: 1 of 1 used\n" in show(job_id)


def test_a_cpu_job_that_mentions_gpu_memory_fails_like_any_other(card: QueueUnderTest) -> None:
    script = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.' >&2; exit 3"
    job_id = submit("--gpus", "0", "--", "sh", "-c", script)
    card.wait(job_id)
    assert [card.job(job_id)[key] for key in ("state", "attempt", "status")] == ["failed", 1, 3]


def test_a_job_too_large_for_every_gpu_fails_at_once_with_the_figure(card: QueueUnderTest) -> None:
    job_id = submit_shell(f"exec {SIM_JOB} --vram 31G")
    waited = run_here("wait", str(job_id))
    assert waited.returncode == 5
    assert "needed at least 31 GB; the largest GPU has 24 GB" in waited.stderr
    assert [one["outcome"] for one in card.job(job_id)["attempts"]] == ["out-of-memory"]


def test_a_script_that_reads_how_often_it_ran_out_is_run_again(card: QueueUnderTest, gate: Path) -> None:
    script = gate.with_name("train.sh")
    script.write_text(f"{SIM_JOB} --vram $((40 >> GPUYARD_OOM_COUNT))G --seconds 0\n")
    job_id = submit("--", "sh", script.name)
    assert run_here("wait", str(job_id)).returncode == 0
    assert [one["outcome"] for one in card.job(job_id)["attempts"]] == ["out-of-memory", "succeeded"]


def test_a_job_that_may_use_less_fails_with_the_figure_after_its_reruns(card: QueueUnderTest) -> None:
    gate = card.gate("gate")
    job_id = submit_shell(f": $GPUYARD_OOM_COUNT; read word < {gate}; exec {SIM_JOB} --vram 30G")
    for again in range(1, 4):
        until(lambda: card.job(job_id)["attempt"] == again, f"attempt {again}")  # noqa: B023 - it is over by then
        card.post("/pause")  # or it may be retried before this test has read it
        gate.write_text("go\n")
        card.until_state(job_id, "delayed", "queued")
        assert "memory: alone (it ran out of memory" in show(job_id)
        assert "next: retry alone on the largest GPU\n" in show(job_id)
        run_here("retry", str(job_id))
        card.post("/unpause")
    gate.write_text("go\n")
    waited = run_here("wait", str(job_id))
    assert waited.returncode == 5
    assert "needed at least 30 GB; the largest GPU has 24 GB" in waited.stderr
    assert "needed 30 GB, had 24 GB" in show(job_id)


def test_a_wrong_declaration_and_a_program_that_takes_the_whole_gpu_are_noted(card: QueueUnderTest, gate: Path) -> None:
    declared = submit("--vram", "20G", "--", *gated_job.COMMAND, "--vram", "1024", gate.name)
    finish_when_seen(card, declared, 1024, gate)
    note = "--vram was 20 GB, but the job used 1 GB at most: leave --vram out, and the need is learned"
    assert f"\nnote: {note}\n" in show(declared)
    assert note in run_here("history", str(declared)).stdout
    script = f"echo jax/_src/xla_bridge.py; {GATED_JOB} --vram 20480 {gate.name}"
    greedy = submit_shell(script)
    finish_when_seen(card, greedy, 20480, gate)
    assert "note: JAX takes 75% of a device" in show(greedy)
    configured = submit_shell(script, "--env", "XLA_PYTHON_CLIENT_MEM_FRACTION=.8")
    finish_when_seen(card, configured, 20480, gate)
    assert "note:" not in show(configured)


def test_a_program_that_preallocates_is_recognised_while_its_first_run_lasts(card: QueueUnderTest, gate: Path) -> None:
    """Its memory jumps to most of the GPU, and its script imports JAX. Other programs are not expected to do so."""
    words = [*gated_job.COMMAND, "--vram", "20480", gate.name]
    gate.with_name("train.py").write_text(f"# import jax\nimport os\nos.execv({words[0]!r}, {words!r})\n")
    command = ("--", sys.executable, "train.py")
    first = submit(*command)
    until(lambda: "preallocates" in run_here("history", str(first)).stdout, "the event")
    for shown in (show(first), run_here("why", str(first)).stdout):
        assert "JAX takes 75% of a device at its start" in shown
        assert "set XLA_PYTHON_CLIENT_PREALLOCATE=false" in shown
    finish_when_seen(card, first, 20480, gate)
    assert run_here("history", str(first)).stdout.count("preallocates") == 1
    assert {row["kind"] for row in card.get("/estimates")["estimates"]} == {"command", "program"}
    again = submit("--hold", *command)
    configured = submit("--hold", "--env", "XLA_PYTHON_CLIENT_PREALLOCATE=false", *command)
    assert [card.job(job_id)["memory"]["basis"] for job_id in (again, configured)] == ["learned", "unknown"]


def test_estimates_are_listed_and_forgotten(card: QueueUnderTest, gate: Path) -> None:
    assert "No estimates yet" in run_here("estimates").stdout
    for megabytes in (2048, 2048, 3072):
        job_id = submit("--", *gated_job.COMMAND, "--vram", str(megabytes), gate.name)
        finish_when_seen(card, job_id, megabytes, gate)
    headings, *rows = run_here("estimates").stdout.splitlines()
    assert headings.split() == [
        "ID", "KIND", "RUNS", "MEMORY", "PEAK", "RAM", "LOAD", "TIME", "OFF", "SEEN", "PROGRAM",
    ]  # fmt: skip
    assert [row.split()[1:3] for row in rows if "--vram 3072" in row] == [["command", "1"]]
    assert [row.split()[1:3] for row in rows if "--vram 2048" in row] == [["command", "2"]]
    answer = json.loads(run_here("estimates", "--json").stdout)
    by_kind = sorted((one["kind"], one["runs"], one["peak_mb"]) for one in answer["estimates"])
    learned = [("command", 1, 3072), ("command", 2, 2048), ("machine", 0, 2048), ("program", 3, 3072)]
    assert by_kind == learned, "with what first runs of any program used"
    (twice,) = [one for one in answer["estimates"] if one["runs"] == 2]
    assert twice["off_percent"] == pytest.approx(12.5)
    assert "+12%" in next(row for row in rows if row.startswith(twice["fingerprint"][:8]))
    assert len(json.loads(run_here("estimates", "--limit", "1", "--json").stdout)["estimates"]) == 1
    assert "and more" in run_here("estimates", "--limit", "1").stdout
    assert run_here("estimates", "forget", twice["fingerprint"][:8]).stdout == "deleted 1 estimate\n"
    assert run_here("estimates", "forget", "--", "gated_job.py", "--vram", "3072").stdout == "deleted 1 estimate\n"
    unknown = run_here("estimates", "forget", "train.py")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "no estimate matches 'train.py'" in unknown.stderr
    assert json.loads(run_here("estimates", "forget", "--all", "--json").stdout) == {"forgotten": 2}
    assert "No estimates yet" in run_here("estimates").stdout


@pytest.mark.parametrize("body", [
    {}, {"words": []}, {"words": "all"}, {"all": "yes"}, {"words": ["a"], "all": True}, {"words": [""]},
])  # fmt: skip
def test_a_forget_request_without_a_target_forgets_nothing(card: QueueUnderTest, body: dict[str, Any]) -> None:
    from gpuyard.errors import UserError

    card.wait(submit("--gpus", "0", "--", "true"))
    with pytest.raises(UserError):
        card.post("/estimates/forget", **body)
    assert len(card.get("/estimates")["estimates"]) == 2


# Against a stand-in


@pytest.fixture
def daemon(own_home: Path) -> Iterator[StandIn]:
    with StandIn(own_home) as stand_in:
        stand_in.answers["POST /submissions"] = {"ids": "1", "first": 1, "last": 1, "count": 1, "notes": []}
        yield stand_in


def digest(daemon: StandIn, cwd: Path, *arguments: str) -> str:
    assert run("submit", *arguments, cwd=cwd).returncode == 0
    return str(daemon.requests[-1].body["configuration"])


def test_a_changed_configuration_file_makes_it_another_command(daemon: StandIn, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("layers: 2\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "small.yaml").write_text("layers: 2\n")
    small = digest(daemon, tmp_path, "--", "python", "train.py", "--config", "small.yaml")
    assert small != ""
    assert digest(daemon, tmp_path, "--", "python", "train.py", "--config=small.yaml") == small
    assert digest(daemon, tmp_path, "--cwd", "sub", "--", "python", "train.py", "small.yaml") == small
    (tmp_path / "small.yaml").write_text("layers: 3\n")
    assert digest(daemon, tmp_path, "--", "python", "train.py", "--config=small.yaml") not in ("", small)


def test_only_small_regular_files_with_a_config_suffix_count_as_configuration(daemon: StandIn, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_bytes(b" " * (1 << 20) + b" ")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "secret.ini").touch()
    (tmp_path / "secret.ini").chmod(0)
    named = ["pipe.json", "large.json", "notes.txt", "folder.toml", "gone.yaml", "--x={lr}.cfg"]
    if os.geteuid() != 0:
        named.append("secret.ini")
    assert digest(daemon, tmp_path, "--", "train", *named) == ""
    (tmp_path / "commands.txt").write_text("train small.yaml\n")
    assert digest(daemon, tmp_path, "--from", "commands.txt") == ""
    assert stat.S_ISFIFO((tmp_path / "pipe.json").stat().st_mode)


@pytest.mark.usefixtures("unmeasured")
def test_a_submission_that_names_a_configuration_file_imports_nothing_heavy(daemon: StandIn, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    command = [GPUYARD[0], "-X", "importtime", "-m", "gpuyard", "submit", "--", "true", "a.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "gpuyard.client.submitted_code" in imported
    assert not imported & {"hashlib", "click", "json", "socket", "msgspec", "difflib"}


CURVE = [[second, 1024.0 * (1 + second // 20)] for second in range(60)]


def test_the_curve_fits_the_terminal_and_is_labelled_with_its_peak_and_its_time(
    daemon: StandIn, tmp_path: Path
) -> None:
    ran = attempt(1, tmp_path, reserved_mb=4096.0, peaks_mb={"SIM-0": 3072.0, "SIM-1": 0.0}, curve=CURVE)
    daemon.answers["GET /jobs/17"] = job(17, "failed", attempts=[ran], device_labels={"SIM-0": "0"})
    for columns in (40, 80, 140):
        lines = run_on_terminal("show", "17", columns=columns).replace("\r", "").split("\n")
        top = next(line for line in lines if line.startswith("  3 GB │"))
        assert len(top) <= columns
        assert top.endswith("███")
        assert lines[lines.index(top) + 4].split() == ["0s", "1m"]
    assert "reserved 4 GB, peak 3 GB on GPU 0, peak 0 MB on SIM-1" in show(17)
    plain = run("show", "17", env={**os.environ, "PYTHONIOENCODING": "ascii"}).stdout
    assert "  3 GB |" in plain
    assert plain.isascii()


def test_a_narrow_terminal_gets_the_figures_without_the_curve(daemon: StandIn, tmp_path: Path) -> None:
    daemon.answers["GET /jobs/17"] = job(17, "running", attempts=[attempt(1, tmp_path, curve=CURVE, load_percent=7.0)])
    output = run_on_terminal("show", "17", columns=15)
    assert "load 7%" in output
    assert "█" not in output


LACK = {
    "where": "host", "says": "the kernel's out-of-memory killer ended it", "framework": "the kernel", "held_mb": 3072.0,
    "asked_mb": None, "free_mb": None, "total_mb": 4096.0, "needed_mb": None, "had_mb": None, "others": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("growth", "following"),
    [
        ({"count": 1, "memory_mb": None, "ram_mb": 4608.0, "alone": False}, "retry with 4.5 GB of RAM"),
        ({"count": 1, "memory_mb": None, "ram_mb": None, "alone": False}, "retry"),
    ],
)
def test_a_lack_of_ram_is_distinguished_from_a_lack_of_gpu_memory(
    daemon: StandIn, tmp_path: Path, growth: dict[str, Any], following: str
) -> None:
    daemon.answers["GET /jobs/17"] = job(17, "delayed", attempts=[attempt(1, tmp_path, lack=LACK)], growth=growth)
    shown = show(17)
    assert "  out of RAM: needed more, had 3 GB\n    this job: held 3 GB\n    RAM: 4 GB in total\n" in shown
    assert f"    next: {following}\n" in shown


def test_an_estimate_from_other_arguments_or_beyond_every_gpu_is_marked(daemon: StandIn) -> None:
    learned = {"basis": "learned", "given_mb": 5325.0, "alone": False, "runs": 3, "same_command": False}
    daemon.answers["GET /jobs/17"] = job(17, memory=learned)
    assert "memory: learned 5.2 GB (from 3 runs with other arguments)\n" in show(17)
    daemon.answers["GET /jobs/17"] = job(17, memory={**learned, "given_mb": None, "alone": True, "same_command": True})
    assert "memory: alone (from 3 runs)\n" in show(17)
    daemon.answers["GET /jobs/17"] = job(17, memory=None, preempts=True, on_preempt="never")
    shown = show(17)
    assert "memory:" not in shown
    assert "preempts: jobs of lower priority\nif preempted: never\n" in shown
