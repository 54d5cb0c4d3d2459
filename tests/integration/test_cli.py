"""The command as a person or a script uses it: real processes, real pipes, a real terminal."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.ui.cli.verbs import EVERYDAY, VERBS
from tests.fakes.queue_command import run_here
from tests.unit.probes.samples_nvidia import MIG_XML, XML

GPUYARD = [sys.executable, "-m", "gpuyard"]
Tools = Callable[[str, str], Path]
DEVICE_KEYS = {
    "id", "index", "vendor", "name", "memory_total_mb", "memory_used_mb", "memory_free_mb", "utilization_percent",
    "power_draw_w", "power_limit_w", "temperature_c", "processes", "healthy",
}  # fmt: skip


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GPUYARD, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **environment},
    )


def put_shell(tools: Tools, name: str, script: str) -> None:
    """Put a shell script on PATH: it answers within the deadline for a sample even on a slow machine."""
    tools(name, f"#!/bin/sh\n{script}\n")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")


@pytest.fixture
def job(simulated: None) -> Iterator["subprocess.Popen[str]"]:
    """A `sim-job` that holds 8 GB of the first device at 60% until the test ends."""
    process = subprocess.Popen(
        [*GPUYARD, "sim-job", "--vram", "8G", "--load", "60", "--seconds", "600"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "holding 8 GB" in process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_devices_in_json_has_the_stable_shape(job: "subprocess.Popen[str]") -> None:
    shape = json.loads(run("devices", "--json").stdout)
    assert {"taken_at", "host", "devices", "problems"} <= shape.keys()
    assert shape["host"]["memory_total_mb"] > 0
    first, second = shape["devices"]
    assert first.keys() >= DEVICE_KEYS
    assert (first["memory_used_mb"], first["utilization_percent"], first["vendor"]) == (8192, 60, "simulated")
    process = {"pid": job.pid, "memory_mb": 8192, "name": None, "utilization_percent": 60.0}
    assert first["processes"] == [process]
    assert (second["memory_used_mb"], second["processes"], second["healthy"]) == (0, [], True)


def test_devices_prints_the_same_as_a_table(job: "subprocess.Popen[str]") -> None:
    result = run("devices", COLUMNS="80")
    assert result.returncode == 0
    assert "8/24 GB" in result.stdout
    assert "60%" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_machine_without_a_gpu_is_reported_and_is_not_an_error(tmp_path: Path) -> None:
    result = run("devices", PATH=str(tmp_path), LD_LIBRARY_PATH="")
    assert result.returncode == 0
    if shutil.which("nvidia-smi") is None:
        assert "No GPU found" in result.stdout


def test_watch_in_a_pipe_prints_plain_lines(job: "subprocess.Popen[str]") -> None:
    result = run("watch", "--interval", "0.1", "--count", "3")
    lines = result.stdout.splitlines()
    assert len(lines) == 9
    assert sum("memory 8/24 GB  use 60%  smoothed 60%" in line for line in lines) == 3
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_watch_logs_every_sample(job: "subprocess.Popen[str]", tmp_path: Path, ending: str) -> None:
    log = tmp_path / f"usage.{ending}"
    assert run("watch", "--interval", "0.1", "--count", "3", "--log", str(log)).returncode == 0
    if ending == "csv":
        rows = list(csv.DictReader(log.read_text().splitlines()))
    else:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["host", "device", "device"] * 3
    assert {str(row["memory_used_mb"]) for row in rows if row["id"] == "SIM-0"} == {"8192.0"}


def test_watch_reports_a_problem_once(tools: Tools) -> None:
    put_shell(tools, "nvidia-smi", "echo broken beyond repair; exit 3")
    result = run("watch", "--interval", "0.05", "--count", "4")
    assert (result.stdout + result.stderr).count("broken beyond repair") == 1
    assert len(result.stdout.splitlines()) == 4


@pytest.mark.usefixtures("unmeasured")  # an interrupt while coverage measures can deadlock
def test_ctrl_c_ends_watch(simulated: None) -> None:
    process = subprocess.Popen([*GPUYARD, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, "")


def test_a_reader_that_closes_the_pipe_early_causes_no_error(simulated: None) -> None:
    command = f"{' '.join(GPUYARD)} watch --interval 0.05 | head -n 1"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    assert result.stdout.count("\n") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.needs("tmux")
def test_watch_on_a_terminal_is_a_live_table_that_fits_80_columns(
    job: "subprocess.Popen[str]", tmp_path: Path, own_home: Path
) -> None:
    tmux = ["tmux", "-S", str(tmp_path / "tmux.sock")]
    settings = f"GPUYARD_HOME={own_home} GPUYARD_SIMULATE=2x24GB LC_ALL=C.UTF-8"
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", "80", "-y", "24", f"{settings} {' '.join(GPUYARD)} watch --interval 0.2"],
        check=True,
    )
    try:
        screen = wait_for_screen(tmux, lambda text: "▅▅▅" in text)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    assert screen.count("Simulated 24 GB") == 2, "the table is drawn in place, not one below the other"
    assert "8/24 GB" in screen
    assert "…" not in screen.partition("command")[0], "no figure is cut"
    assert str(job.pid) in screen


def wait_for_screen(tmux: list[str], condition: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + 90
    while True:
        screen = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
        if condition(screen):
            return screen
        assert time.monotonic() < deadline, screen


def test_doctor_lists_which_probes_work(simulated: None) -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert [(probe["name"], probe["works"], probe["devices"]) for probe in report["probes"]] == [("simulated", True, 2)]
    assert report["healthy"] is True
    assert report["settings"]["GPUYARD_SIMULATE"] == "2x24GB"


def test_doctor_tries_every_probe_and_quotes_the_tool_s_last_output(tools: Tools) -> None:
    put_shell(tools, "nvidia-smi", "echo no way; exit 3")
    put_shell(tools, "rocm-smi", "echo WARNING: nothing here")
    result = run("doctor")
    report = json.loads(run("doctor", "--json").stdout)
    names = [probe["name"] for probe in report["probes"]]
    assert names == [
        "nvml", "nvidia-smi", "amdsmi", "amd-smi", "rocm-smi", "radeontop", "intel_gpu_top", "xpu-smi", "sysfs",
        "powermetrics+ioreg",
    ]  # fmt: skip
    assert any("no way" in advice for advice in report["advice"])
    assert result.returncode == 1
    assert "no way" in result.stdout


def test_doctor_points_out_an_unhealthy_device(tools: Tools) -> None:
    put_shell(tools, "nvidia-smi", "echo Unable to determine the device handle for GPU 0000:09:00.0: Unknown Error")
    result = run("doctor")
    assert result.returncode == 1
    assert "unhealthy: Unknown Error" in result.stdout


def test_replay_reads_a_saved_output(tmp_path: Path) -> None:
    saved = tmp_path / "saved.xml"
    saved.write_text(MIG_XML)
    shape = json.loads(run("doctor", "replay", "nvidia-smi-xml", str(saved), "--json").stdout)
    assert [device["id"][:4] for device in shape["devices"]] == ["GPU-", "MIG-", "MIG-"]
    assert all(device.keys() >= DEVICE_KEYS for device in shape["devices"])
    assert shape["host"]["memory_total_mb"] is None
    assert "0:1" in run("doctor", "replay", "nvidia-smi-xml", str(saved)).stdout


def test_replay_reads_standard_input() -> None:
    result = subprocess.run(
        [*GPUYARD, "doctor", "replay", "nvidia-smi-xml", "-", "--json"], input=XML, capture_output=True, text=True,
        timeout=90, check=True,
    )  # fmt: skip
    assert len(json.loads(result.stdout)["devices"]) == 2


def test_replay_of_unknown_output_is_a_one_line_error_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("milk, eggs\nbread\n")
    for tool in ("nvidia-smi-xml", "nvidia-smi-csv", "nvidia-smi-apps", "rocm-smi", "amd-smi", "radeontop",
                 "intel_gpu_top", "xpu-smi", "powermetrics", "ioreg"):  # fmt: skip
        result = run("doctor", "replay", tool, str(tmp_path / "notes.txt"), "--json")
        assert (result.returncode, json.loads(result.stdout)["error"]["code"]) == (2, "usage")
        assert len(result.stderr.strip().splitlines()) == 1
        assert "notes.txt" in result.stderr


def test_a_sim_job_on_a_full_device_fails_as_a_cuda_program_does(job: "subprocess.Popen[str]") -> None:
    result = run("sim-job", "--vram", "20G", "--ramp", "0.5", "--seconds", "1")
    assert result.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in result.stderr
    assert run("sim-job", "--vram", "20G", "--device", "1", "--seconds", "0.1").returncode == 0


def test_a_sim_job_uses_the_device_it_is_shown(simulated: None) -> None:
    assert "SIM-1: holding" in run("sim-job", "--seconds", "0", CUDA_VISIBLE_DEVICES="SIM-1,SIM-0").stdout
    refused = run("sim-job", "--seconds", "0", CUDA_VISIBLE_DEVICES="5")
    assert refused.returncode == 2
    assert "SIM-0" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["devcies"], "did you mean `gpuyard devices`?"),
        (["undrain", "0"], "did you mean `gpuyard devices undrain`?"),
        (["frobnicate"], "gpuyard --help"),
        *(([word], "did you mean `gpuyard queue`?") for word in ("status", "ls", "ps", "list", "jobs")),
        *(([word, "17"], "did you mean `gpuyard cancel`?") for word in ("kill", "rm", "stop")),
        (["tail", "17"], "did you mean `gpuyard logs -f`?"),
        (["squeu"], "did you mean `gpuyard queue`?"),
        (["watch", "--log", "usage.txt"], ".csv or .jsonl"),
        (["watch", "--interval", "0"], "--interval"),
        (["watch", "--interval", "soon"], "10m"),
        (["sim-job", "--ramp", "inf"], "10m"),
        (["watch", "--count", "none"], "--count"),
        (["sim-job", "--vram", "8Q"], "8G"),
        (["sim-job"], "GPUYARD_SIMULATE=2x24GB"),
        (["doctor", "replay", "gpu-z", "x"], "nvidia-smi-xml"),
    ],
)
def test_a_usage_error_says_what_to_type_instead(arguments: list[str], message: str) -> None:
    result = run_here(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_sampled(simulated: None) -> None:
    result = run("watch", "--count", "1", "--log", "/nowhere/usage.csv")
    assert result.returncode == 1
    assert "/nowhere/usage.csv" in result.stderr
    assert result.stdout == ""


def test_an_invalid_simulation_is_refused() -> None:
    result = run("devices", GPUYARD_SIMULATE="lots")
    assert result.returncode == 2
    assert "2x24GB" in result.stderr


def test_the_help_shows_ten_everyday_commands_and_names_all_others_in_few_lines() -> None:
    text = run("--help").stdout
    everyday, others = text.partition("Every day:")[2].split("All others")
    for verb in EVERYDAY:
        assert re.search(rf"^  {verb} +[A-Z]", everyday, re.MULTILINE)
    assert len(EVERYDAY) == 10
    assert all(re.search(rf"\b{verb}\b", others) for verb in VERBS if verb not in EVERYDAY)
    assert len(others.splitlines()) <= 10


def test_every_command_has_version_and_help() -> None:
    assert run("--version").stdout.startswith("gpuyard ")
    overview = run("--help").stdout
    for verb in ("devices", "watch", "doctor", "sim-job", "completion"):
        assert verb in overview
        assert "Usage: gpuyard" in run(verb, "--help").stdout
    assert "Usage: gpuyard doctor replay" in run("doctor", "replay", "--help").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_completion(shell: str) -> None:
    assert "_GPUYARD_COMPLETE" in run("completion", shell).stdout


def test_completion_answers_with_our_verbs() -> None:
    answer = run(_GPUYARD_COMPLETE="bash_complete", COMP_WORDS="gpuyard de", COMP_CWORD="1")
    assert "devices" in answer.stdout


def test_the_command_imports_only_what_it_needs() -> None:
    version = "import atexit, sys; sys.argv = ['gpuyard', '--version']\n"
    program = f"{version}try:\n import gpuyard.__main__\nexcept SystemExit: pass\n"
    check = f"{program}print(sorted({{'rich', 'psutil', 'pynvml', 'msgspec'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_scripts_get_a_snapshot_from_one_call(job: "subprocess.Popen[str]") -> None:
    program = "import gpuyard; print([d.memory_used_mb for d in gpuyard.snapshot().devices])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "[8192.0, 0.0]\n"


@pytest.mark.parametrize("arguments", [["devices"], ["devices", "--json"], ["watch", "--count", "1"], ["doctor"]])
def test_a_full_or_closed_output_causes_no_crash(simulated: None, arguments: list[str]) -> None:
    command = " ".join([*GPUYARD, *arguments])
    full = subprocess.run(["sh", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "gpuyard: No space left on device\n")
    closed = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_terminal_without_unicode_still_gets_a_table(tools: Tools, tmp_path: Path) -> None:
    output = XML.replace("NVIDIA Test One", f"NVIDIA Tést {'x' * 80}")
    (tmp_path / "output").write_text(output, encoding="utf-8")
    put_shell(tools, "nvidia-smi", f"cat {tmp_path}/output")
    result = run("devices", PYTHONIOENCODING="ascii", COLUMNS="80")
    assert result.returncode == 0
    assert "NVIDIA T?st xxx" in result.stdout


def test_devices_names_the_users_of_each_device(job: "subprocess.Popen[str]") -> None:
    line = next(line for line in run("devices", COLUMNS="100").stdout.splitlines() if str(job.pid) in line)
    assert "8 GB" in line
    assert "gpuyard sim-job --vram 8G" in line


def test_an_unwritable_home_is_a_one_line_error(simulated: None) -> None:
    result = run("sim-job", "--seconds", "0", GPUYARD_HOME="/proc/nowhere")
    assert result.returncode == 1
    assert "/proc/nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_ends_watch(simulated: None) -> None:
    process = subprocess.Popen([*GPUYARD, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, "")


def test_consecutive_snapshots_reuse_the_same_threads(simulated: None) -> None:
    program = (
        "import gpuyard, threading\n"
        "counts = []\n"
        "for _ in range(5): gpuyard.snapshot(); counts.append(threading.active_count())\n"
        "print(len(set(counts)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "1\n"


def test_a_forked_child_reads_the_devices_itself(simulated: None) -> None:
    program = (
        "import gpuyard, os\n"
        "gpuyard.snapshot()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(len(gpuyard.snapshot().devices))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout == "2\n"
