"""RAM and CPUs are reserved by the queue, by scripts and by `gpuyard run`. The machine has 23 GB and 4 CPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard import GPUScheduler
from gpuyard.errors import UserError
from gpuyard.ledger.ledger import open_ledger
from tests.fakes.queue_command import run, run_here
from tests.integration.queue_fixture import QueueUnderTest, until

GB = 1024.0
# Takes the lease, says so, and ends when it reads a line.
SCRIPT = """
import sys
from gpuyard import GPUScheduler
with GPUScheduler(vram="2G", ram="8G", poll_interval=0.2, quiet=True):
    open(sys.argv[1], "x").close()
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE_HOST", "23GB,4")


def until_running(queue: QueueUnderTest, count: int) -> None:
    until(lambda: queue.counts().get("running", 0) == count, f"{count} jobs that run")


def reserved_mb() -> float:
    return sum((lease.host.ram_mb or 0.0) for lease in open_ledger().leases() if lease.host is not None)


def test_an_array_of_jobs_of_8_gb_runs_two_at_a_time(queue: QueueUnderTest, tmp_path: Path) -> None:
    waits = f"until [ -e {tmp_path}/go-$GPUYARD_ARRAY_INDEX ]; do sleep 0.05; done"
    first = queue.shell(waits, vram="2G", ram="8G", array="0-7")
    for ended in range(8):
        at_once = min(2, 8 - ended)
        until_running(queue, at_once)
        assert reserved_mb() == 8 * GB * at_once
        if ended == 0:
            assert "5 GB of 23 GB RAM free, 8 GB needed" in queue.why(first + 2)
        (tmp_path / f"go-{ended}").touch()
        queue.until_state(first + ended, "succeeded")
    queue.wait()


@pytest.mark.usefixtures("two_gpus")
def test_eight_scripts_of_8_gb_run_two_at_a_time(own_home: Path) -> None:
    def is_in(index: int) -> bool:
        return (own_home / f"in{index}").exists()

    def until_inside(count: int) -> None:
        until(lambda: sum(map(is_in, range(8))) == count, f"{count} scripts that got in")

    command = [sys.executable, "-c", SCRIPT]
    scripts = [
        subprocess.Popen([*command, str(own_home / f"in{index}")], stdin=subprocess.PIPE, text=True)
        for index in range(8)
    ]
    try:
        for ended in range(8):
            at_once = min(2, 8 - ended)
            until_inside(ended + at_once)
            assert reserved_mb() == 8 * GB * at_once
            inside = [index for index in range(8) if is_in(index) and scripts[index].poll() is None]
            scripts[inside[0]].communicate("\n", timeout=90)
    finally:
        for script in scripts:
            script.kill()
            script.communicate()


def test_jobs_without_a_gpu_reserve_ram_and_those_that_say_nothing_take_no_lease(queue: QueueUnderTest) -> None:
    job, gate = queue.start_gated(gpus="0", ram="16G")
    (lease,) = open_ledger().leases()
    assert (lease.shares, lease.host and lease.host.ram_mb) == ((), 16 * GB)
    waiting = queue.submit("true", gpus="0", ram="6G")
    plain = queue.submit("true", gpus="0")
    queue.until_state(plain, "succeeded")
    assert queue.state(waiting) == "queued"
    assert "waits for RAM or CPUs" in queue.why(waiting)
    gate.write_text("go\n")
    queue.wait()
    assert [queue.state(each) for each in (job, waiting)] == ["succeeded"] * 2


def test_cpus_are_counted_and_programs_see_them(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(gpus="0", cpus="3")
    waiting = queue.shell("echo $OMP_NUM_THREADS $MKL_NUM_THREADS $GPUYARD_CPUS", gpus="0", cpus="2")
    until(lambda: "1 of 4 CPUs free, 2 needed" in queue.why(waiting), "its reason")
    gate.write_text("go\n")
    queue.wait()
    assert queue.log_of(waiting) == "2 2 2\n"


def test_threads_that_the_user_set_stay(queue: QueueUnderTest) -> None:
    environment = {"PATH": "/bin:/usr/bin", "OMP_NUM_THREADS": "7"}
    job = queue.shell("echo $OMP_NUM_THREADS $MKL_NUM_THREADS", gpus="0", cpus="2", environment=environment)
    queue.wait()
    assert queue.log_of(job) == "7 2\n"


def test_more_than_the_machine_can_give_is_refused_at_once(queue: QueueUnderTest) -> None:
    for options, text in (
        ({"ram": "64G"}, "64 GB of RAM is more than this machine can give (21 GB of 23 GB)"),
        ({"cpus": "5"}, "5 CPUs are more than this machine can give (4 of 4)"),
    ):
        with pytest.raises(UserError, match=text.replace("(", r"\(").replace(")", r"\)")):
            queue.submit("true", gpus="0", **options)
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        refused = run("run", "--gpus", "0", *flags, "--", "true")
        assert refused.returncode != 0
        assert text in refused.stderr
    with pytest.raises(UserError, match="64 GB of RAM is more"):
        GPUScheduler(vram="1G", ram="64G").acquire()


def test_run_reserves_ram_and_waits_for_it(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(gpus="0", ram="16G")
    failed = run("run", "--gpus", "0", "--ram", "8G", "--wait", "0.1s", "--", "true")
    assert failed.returncode == 124
    assert "5 GB of 23 GB RAM free, 8 GB needed" in failed.stderr
    fits = run("run", "--gpus", "0", "--ram", "4G", "--cpus", "2", "--", "sh", "-c", "echo $GPUYARD_CPUS")
    assert fits.stdout == "2\n"
    gate.write_text("go\n")
    queue.wait()


def test_leases_devices_and_metrics_show_what_is_reserved(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(vram="2G", ram="8G", cpus="2")
    (lease,) = json.loads(run_here("leases", "--json").stdout)["leases"]
    assert (lease["host"]["ram_mb"], lease["host"]["cpus"]) == (8 * GB, 2)
    assert "8 GB" in run_here("leases").stdout
    line = "8 GB of RAM and 2 CPUs reserved by 1 lease, 2 GB kept free; 13 GB left to reserve"
    assert line in run_here("devices").stdout
    assert json.loads(run_here("devices", "--json").stdout)["host_reserved"]["ram_mb"] == 8 * GB
    assert queue.get("/devices")["host_reserved"]["leases"] == 1
    assert "RAM: 8 GB\nCPUs: 2" in run_here("show", "1").stdout
    gate.write_text("go\n")
    queue.wait()


def test_a_restarted_daemon_still_counts_the_ram_of_running_jobs(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(vram="2G", ram="16G")
    queue.restart()
    waiting = queue.submit("true", vram="2G", ram="8G")
    until(lambda: "8 GB needed" in queue.why(waiting), "its reason")
    assert queue.state(waiting) == "queued"
    gate.write_text("go\n")
    queue.wait()


HOG = "import os, time\nkept = bytearray(700 << 20)\nwhile not os.path.exists(os.environ['GATE']): time.sleep(0.05)"


def test_a_job_without_a_gpu_that_used_much_ram_reserves_it_in_its_next_runs(
    own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 4 GB, 2 GB can be reserved: two runs of about 0.8 GB fit."""
    monkeypatch.setenv("GPUYARD_SIMULATE_HOST", "4GB,8")
    own_queue.home.mkdir()
    (own_queue.home / "config.toml").write_text('[queue]\ncpu_jobs = 8\n[host]\nkeep_free = "2G"\n')
    own_queue.start()

    def submit(gate: str) -> int:
        environment = {"PATH": "/bin:/usr/bin", "GATE": str(tmp_path / gate)}
        return own_queue.submit(sys.executable, "-c", HOG, gpus="0", environment=environment)

    first = submit("first")
    own_queue.until_state(first, "running")
    until(lambda: (own_queue.job(first)["attempts"][-1]["ram_mb"] or 0.0) > 700, "a measurement of its RAM")
    assert open_ledger().leases() == (), "nothing is known about it"
    (tmp_path / "first").touch()
    own_queue.wait(first)
    later = [submit("later") for _ in range(3)]
    own_queue.until_state(later[1], "running")
    until(lambda: "RAM free" in own_queue.why(later[2]), "its reason")
    reserved = [lease.host.ram_mb for lease in open_ledger().leases() if lease.host is not None]
    assert len(reserved) == 2
    assert all(700 < (each or 0.0) < 1024 for each in reserved)
    (tmp_path / "later").touch()
    own_queue.wait()
    assert own_queue.counts() == {"succeeded": 4}
