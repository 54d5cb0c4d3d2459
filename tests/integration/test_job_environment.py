"""What a job inherits: umask, soft limits and niceness of the shell that submitted it, not of the daemon's shell."""

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuyard.client.client import Client
from tests.integration.queue_fixture import DAEMON, QueueUnderTest, until
from tests.unit.ledger import as_root

# Prints what the process has, and a file that it creates shows the umask.
REPORT = (
    "import json, os, resource, signal, sys\n"
    "umask = os.umask(0); os.umask(umask)\n"
    "names = [name for name in dir(resource) if name.startswith('RLIMIT_') and name != 'RLIMIT_OFILE']\n"
    "limits = {name[7:]: resource.getrlimit(getattr(resource, name)) for name in names}\n"
    "blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]\n"
    "ignored = [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN]\n"
    "try: tty = os.ttyname(os.open('/dev/tty', os.O_RDWR))\n"
    "except OSError: tty = None\n"
    "print(json.dumps({'umask': umask, 'niceness': os.getpriority(os.PRIO_PROCESS, 0), 'limits': limits,\n"
    "    'cwd': os.getcwd(), 'environment': dict(os.environ), 'blocked': blocked, 'ignored': ignored, 'tty': tty,\n"
    "    'stdin': sys.stdin.read(), 'session': os.getsid(0) == os.getpid(), 'groups': os.getgroups(),\n"
    "    'descriptors': [each for each in range(64) if os.path.exists(f'/proc/self/fd/{each}')]}))\n"
)
IN_SHELL = 'umask 027; ulimit -S -n 600; ulimit -S -c 0; ulimit -S -s 4096; exec nice -n 5 "$@"'


def report_of(queue: QueueUnderTest, job_id: int) -> dict[str, Any]:
    queue.wait(job_id)
    found: dict[str, Any] = json.loads(queue.log_of(job_id))
    return found


def submit_in(shell: str, *options: str) -> int:
    """Submit the report from a shell that has run these commands."""
    command = [sys.executable, "-m", "gpuyard", "submit", *options, "--", sys.executable, "-c", REPORT]
    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *command], capture_output=True, text=True, timeout=90, check=True
    )
    return int(done.stdout)


@pytest.fixture
def strict_queue(own_queue: QueueUnderTest) -> QueueUnderTest:
    """A queue whose daemon was started by a shell with a strict umask, few open files, and a niceness of 1."""
    own_queue.start(["/bin/sh", "-c", 'umask 077; ulimit -S -n 300; exec nice -n 1 "$@"', "sh", *DAEMON])
    return own_queue


@as_root  # only root may give a job a lower niceness than the daemon's
def test_a_job_has_what_the_shell_has_that_submitted_it(strict_queue: QueueUnderTest) -> None:
    own = report_of(strict_queue, submit_in('exec "$@"', "--gpus", "0"))
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in own["limits"]}
    umask = os.umask(0o022)
    os.umask(umask)
    assert (own["umask"], own["niceness"]) == (umask, os.getpriority(os.PRIO_PROCESS, 0))
    assert {name: limit for name, (limit, _) in own["limits"].items()} == soft
    first, second = submit_in(IN_SHELL, "--gpus", "0"), submit_in(IN_SHELL, "--device", "1")
    file = strict_queue.home.parent / "of-the-user"
    strict_queue.wait(submit_in(IN_SHELL, "--gpus", "0", "--output", str(file)))
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    for job_id in (first, second):
        found = report_of(strict_queue, job_id)
        assert (found["umask"], found["niceness"]) == (0o027, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        assert [found["limits"][name][0] for name in ("NOFILE", "CORE", "STACK")] == [600, 0, 4096 * 1024]
        assert [found["limits"][name][1] for name in ("NOFILE", "CORE")] == [
            resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_CORE)[1],
        ]  # fmt: skip
    assert strict_queue.job(first)["shell"]["umask"] == 0o027
    # A submission without these values, as from the page, has the daemon's; and so has the keeper still.
    plain = report_of(strict_queue, strict_queue.submit(sys.executable, "-c", REPORT, gpus=0))
    assert (plain["umask"], plain["niceness"], plain["limits"]["NOFILE"][0]) == (0o077, own["niceness"] + 1, 300)


@as_root
def test_a_retry_in_a_later_daemon_and_a_resubmission_keep_them(strict_queue: QueueUnderTest) -> None:
    job_id = submit_in(IN_SHELL, "--gpus", "0")
    report_of(strict_queue, job_id)
    strict_queue.stop()
    strict_queue.start()
    strict_queue.post("/jobs/retry", ids=str(job_id))
    strict_queue.wait(job_id)
    again = json.loads(strict_queue.log_of(job_id, 2))
    other = report_of(strict_queue, int(strict_queue.post(f"/jobs/{job_id}/resubmit")["first"]))
    for found in (again, other):
        assert (found["umask"], found["limits"]["NOFILE"][0]) == (0o027, 600)


def test_limits_that_no_program_fits_in_fail_that_job_alone(queue: QueueUnderTest) -> None:
    shell = {"umask": 0o022, "limits": {"AS": 4096 * 100}}
    body = {"token": "t", "command": ["true"], "cwd": "/", "environment": {}, "options": {"gpus": 0}, "shell": shell}
    failing = int(queue.client.request("POST", "/submissions", body=body)["first"])
    queue.wait(failing)
    assert queue.job(failing)["reason"] == "the limits (ulimit) of the shell that submitted it let no program start"
    assert queue.wait(queue.submit("true"))["succeeded"] == 1
    for wrong in ({"umask": 0o1000}, {"niceness": 20}, {"limits": {"FILES": 3}}, {"limits": {"AS": -2}}, {"mask": 0}):
        with pytest.raises(Exception, match="shell"):
            queue.client.request("POST", "/submissions", body={**body, "token": "u", "shell": wrong})


def test_a_task_on_its_own_terminal_has_them_too(queue: QueueUnderTest, tmp_path: Path) -> None:
    marker, found = tmp_path / "marker", tmp_path / "found"
    task = {"workspace": str(tmp_path), "config": "a", "owner": "t/a", "marker": str(marker), "record": f"{tmp_path}/r"}
    script = f"umask > {found}; ulimit -S -n >> {found}; nice >> {found}; : > {marker}"
    shell = {"umask": 0o027, "niceness": 7, "limits": {"NOFILE": 222}}
    body = {
        "token": "t", "command": ["/bin/sh", "-c", script], "cwd": "/", "environment": {"PATH": os.environ["PATH"]},
        "options": {"tag": "t"}, "task": task, "shell": shell,
    }  # fmt: skip
    queue.wait(int(queue.client.request("POST", "/submissions", body=body)["first"]))
    assert found.read_text().split() == ["0027", "222", "7"]


def test_the_rest_of_a_job_s_environment(queue: QueueUnderTest, tmp_path: Path) -> None:
    """What docs/reference/job-environment.md lists, of a job that was submitted by a script."""
    os.environ["MINE"] = "äöü"
    try:
        with Client() as client:
            job_id = client.submit(sys.executable, "-c", REPORT, gpus=1, cwd=tmp_path).first
    finally:
        del os.environ["MINE"]
    found = report_of(queue, job_id)
    environment = found["environment"]
    assert (found["cwd"], environment["MINE"], environment["PATH"]) == (str(tmp_path), "äöü", os.environ["PATH"])
    assert environment["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert {name for name in environment if name.startswith("GPUYARD_")} >= {
        "GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_OOM_COUNT", "GPUYARD_QUEUE", "GPUYARD_LEASE",
    }  # fmt: skip
    assert (found["stdin"], found["tty"], found["session"], found["descriptors"]) == ("", None, True, [0, 1, 2, 8])
    assert (found["blocked"], sorted(found["groups"])) == ([], sorted(os.getgroups()))
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_output_of_python_is_unbuffered_unless_the_user_says_otherwise(queue: QueueUnderTest) -> None:
    plain = {"PATH": os.environ["PATH"]}
    for given, expected in (({}, "1"), ({"PYTHONUNBUFFERED": ""}, ""), ({"PYTHONUNBUFFERED": "0"}, "0")):
        job_id = queue.submit("sh", "-c", 'echo "[$PYTHONUNBUFFERED]"', environment={**plain, **given})
        queue.wait(job_id)
        assert queue.log_of(job_id) == f"[{expected}]\n"


def test_the_configuration_turns_it_off(own_queue: QueueUnderTest) -> None:
    own_queue.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (own_queue.home / "config.toml").write_text("[queue]\npython_unbuffered = false\n", encoding="utf-8")
    own_queue.start()
    job_id = own_queue.submit("sh", "-c", 'echo "[${PYTHONUNBUFFERED-unset}]"')
    own_queue.wait(job_id)
    assert own_queue.log_of(job_id) == "[unset]\n"


def test_the_configuration_keeps_frameworks_from_preallocating(own_queue: QueueUnderTest) -> None:
    """Only where they have a GPU, and only if the user has not configured them."""
    own_queue.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (own_queue.home / "config.toml").write_text('[packing]\npreallocation = "off"\n', encoding="utf-8")
    own_queue.start()
    script = 'echo "${XLA_PYTHON_CLIENT_PREALLOCATE-unset} ${TF_FORCE_GPU_ALLOW_GROWTH-unset}"'
    own = {"PATH": os.environ["PATH"], "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    jobs = {
        own_queue.shell(script): "false true\n",
        own_queue.shell(script, environment=own): "unset true\n",
        own_queue.shell(script, gpus=0): "unset unset\n",
    }
    own_queue.wait()
    assert {job_id: own_queue.log_of(job_id) for job_id in jobs} == jobs
    for options, printed in (("--vram 1G", "false true\n"), ("--exclusive", "unset unset\n")):
        command = [sys.executable, "-m", "gpuyard", "run", *options.split(), "--", "sh", "-c", script]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == printed


def test_logs_follow_shows_what_a_python_program_prints_while_it_runs(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    job_id = queue.submit(sys.executable, "-c", f"print('epoch 1'); open({str(gate)!r}).read()", gpus=0)
    follow = subprocess.Popen(
        [sys.executable, "-m", "gpuyard", "logs", "-f", str(job_id)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert follow.stdout is not None
        until(lambda: queue.log_of(job_id) if queue.state(job_id) == "running" else "", "output of a running program")
        assert follow.stdout.readline() == "epoch 1\n"
        assert queue.state(job_id) == "running"
        gate.write_text("go")
        assert follow.wait(90) == 0
    finally:
        follow.kill()
        follow.wait()
        assert follow.stdout is not None
        follow.stdout.close()
