"""A home that several machines share: on a file system that looks local, and on a network disk."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.fakes.hosts import CLUSTER_LOCKS, LOCAL_LOCKS, Host
from tests.integration.queue_fixture import until
from tests.scale import size
from tests.unit.ledger import as_root

pytestmark = [
    as_root,
    pytest.mark.linux("machines are made of namespaces"),
    pytest.mark.needs("bindfs", "unshare", "nsenter"),
]
LOCKS = [pytest.param(LOCAL_LOCKS, id="local-locks"), pytest.param(CLUSTER_LOCKS, id="cluster-wide-locks")]
Make = Callable[..., Host]
_BOOT = "/proc/sys/kernel/random/boot_id"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Make]:
    """Return a function that starts a machine; all share one home. `kind` is the type of its file system."""
    made: list[Host] = []

    def make(name: str, *, kind: str = "fuse.weka", locks: tuple[str, ...] = LOCAL_LOCKS) -> Host:
        made.append(Host(name, tmp_path, kind=kind, locks=locks))
        if locks == CLUSTER_LOCKS:
            made[-1].trust_file_system()
        return made[-1]

    yield make
    for each in made:
        each.power_off()


def start_gated(host: Host, tmp_path: Path) -> Path:
    """Start a job that runs until the returned file exists, and notes its start and its end in `evidence`."""
    gate, evidence = tmp_path / "gate", tmp_path / "evidence"
    script = f"echo start >> {evidence}; while [ ! -e {gate} ]; do sleep 0.05; done; echo end >> {evidence}"
    done = host.gpuyard("submit", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    until(evidence.exists, "the start of the job")
    return gate


@pytest.mark.parametrize("locks", LOCKS)
def test_another_machine_leaves_a_queue_alone_and_says_where_it_is(
    host: Make, tmp_path: Path, locks: tuple[str, ...]
) -> None:
    alpha, bravo = host("alpha", locks=locks), host("bravo", locks=locks)
    gate = start_gated(alpha, tmp_path)

    for command in (("queue",), ("submit", "--", "true"), ("daemon", "status"), ("daemon", "start"), ("daemon", "run")):
        refused = bravo.gpuyard(*command)
        assert refused.returncode == 1
        assert "this queue belongs to the host alpha (its daemon was started there on " in refused.stderr
    assert "`ssh alpha gpuyard queue`" in refused.stderr

    # Another machine's lease neither counts, nor is it removed.
    leased = bravo.gpuyard("run", "--gpus", "2", "--wait", "60s", "--", "true")
    assert leased.returncode == 0, leased.stderr
    assert len(json.loads(alpha.gpuyard("leases", "--json").stdout)["leases"]) == 1

    assert "running" in alpha.gpuyard("queue").stdout
    gate.touch()
    assert alpha.gpuyard("wait", "1").returncode == 0
    assert (tmp_path / "evidence").read_text() == "start\nend\n"


def test_on_a_network_disk_each_machine_has_a_queue_on_its_own_disk(host: Make, tmp_path: Path) -> None:
    alpha, bravo = host("alpha", kind="fuse.sshfs"), host("bravo", kind="fuse.sshfs")
    gate = start_gated(alpha, tmp_path)
    status = json.loads(alpha.gpuyard("daemon", "status", "--json").stdout)
    assert status["state_dir"].startswith("/var/tmp/gpuyard-0/")
    report = alpha.gpuyard("doctor").stdout
    named = alpha.home / ".local/state/gpuyard"
    assert f"in place of {named}: it is on a network file system (fuse.sshfs)" in report

    # No second queue is started by the way, and nothing has to be guessed.
    for command in (("queue",), ("submit", "--", "true")):
        refused = bravo.gpuyard(*command)
        assert refused.returncode == 1
        assert "your queue is on the host alpha (its daemon was started there on " in refused.stderr
        assert "`gpuyard daemon start` starts a second queue, on bravo" in refused.stderr
    assert bravo.gpuyard("daemon", "start").returncode == 0
    assert "another queue of yours: on alpha" in bravo.gpuyard("doctor").stdout
    submitted = bravo.gpuyard("submit", "--", "sh", "-c", f"hostname > {tmp_path}/where")
    assert submitted.returncode == 0, submitted.stderr
    assert bravo.gpuyard("wait", "1").returncode == 0
    assert (tmp_path / "where").read_text() == "bravo\n"

    # The configuration stays in the home; scripts lease GPUs without the queue.
    script = "from gpuyard import GPUScheduler\nwith GPUScheduler() as gpus: print(gpus)"
    leased = alpha.shell('exec "$@"', sys.executable, "-c", script)
    assert (leased.returncode, leased.stdout) == (0, "[1]\n"), leased.stderr
    (tmp_path / "disk" / ".config/gpuyard").mkdir(parents=True)
    (tmp_path / "disk" / ".config/gpuyard/config.toml").write_text("[devices]\nbanned = [1]\n")
    assert alpha.gpuyard("run", "--gpus", "2", "--wait", "1s", "--", "true").returncode != 0

    gate.touch()
    assert alpha.gpuyard("wait", "1").returncode == 0
    alpha.power_off()
    alpha.boot()
    assert "succeeded" in alpha.gpuyard("queue", "--all").stdout
    assert (tmp_path / "evidence").read_text() == "start\nend\n"

    # Removing it from one machine leaves the queue of the other alone.
    removed = alpha.gpuyard("uninstall", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert list(alpha.var_tmp.rglob("*.*")) == []
    assert [each.name.partition("-")[0] for each in (tmp_path / "disk/.local/state/gpuyard/hosts").iterdir()] == [
        "bravo"
    ]
    assert "succeeded" in bravo.gpuyard("queue", "--all").stdout


def test_commands_reach_the_queue_over_ssh_if_the_configuration_says_so(host: Make, tmp_path: Path) -> None:
    alpha, bravo = host("alpha"), host("bravo")
    assert alpha.gpuyard("daemon", "start").returncode == 0
    (tmp_path / "disk" / ".config/gpuyard").mkdir(parents=True)
    (tmp_path / "disk" / ".config/gpuyard/config.toml").write_text('[queue]\nreach = "ssh"\n')
    ssh = tmp_path / "tools" / "ssh"
    ssh.parent.mkdir()
    write_executable(ssh, f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/arguments\necho from alpha; cat >&2; exit 7\n')
    bravo.environment["PATH"] = f"{ssh.parent}:{bravo.environment['PATH']}"

    odd = "it's; $HOME * \\ \n\u00e9"
    done = bravo.gpuyard("submit", "--name", "far", "--", "printf", "%s", odd)
    assert (done.returncode, done.stdout) == (7, "from alpha\n")
    *_, address, command, _ = (tmp_path / "arguments").read_text().split("\0")
    assert address == "alpha"
    there = alpha.shell(command)  # as sshd would have a shell run it
    assert there.returncode == 0, there.stderr
    assert alpha.gpuyard("wait", "1").returncode == 0
    assert alpha.gpuyard("logs", "1").stdout.rstrip("\n") == odd
    assert json.loads(alpha.gpuyard("show", "1", "--json").stdout)["cwd"] == str(tmp_path / "bravo")

    # On the machine that it was passed on to, it is not passed on again.
    refused = bravo.shell(command)
    assert refused.returncode == 1
    assert "this queue belongs to the host alpha" in refused.stderr


@pytest.mark.full
def test_a_queue_is_adopted_from_a_machine_that_is_gone(host: Make, tmp_path: Path) -> None:
    alpha, bravo = host("alpha"), host("bravo")
    assert alpha.gpuyard("submit", "--hold", "--", "true").returncode == 0
    alpha.power_off()
    assert "belongs to the host alpha" in bravo.gpuyard("queue").stderr
    assert "write `--from alpha`" in bravo.gpuyard("daemon", "adopt", "--from", "charlie").stderr
    adopted = bravo.gpuyard("daemon", "adopt", "--from", "alpha")
    assert adopted.returncode == 0, adopted.stderr
    assert bravo.gpuyard("release", "1").returncode == 0
    assert bravo.gpuyard("wait", "1").returncode == 0
    alpha.boot()
    assert "belongs to the host bravo" in alpha.gpuyard("queue").stderr


@pytest.mark.parametrize(
    "locks", [LOCKS[0], pytest.param(CLUSTER_LOCKS, marks=pytest.mark.full, id="cluster-wide-locks")]
)
def test_nothing_runs_twice_and_nothing_is_lost_while_both_machines_use_a_home(
    host: Make, tmp_path: Path, locks: tuple[str, ...]
) -> None:
    """Commands on two machines in a random order, while daemons are killed, and machines lose power and restart."""
    alpha, bravo = host("alpha", locks=locks), host("bravo", locks=locks)
    if locks == CLUSTER_LOCKS:  # bindfs does not release a lock whose descriptor was passed to another process
        alpha.environment["GPUYARD_LOCK_DIR"] = "/var/tmp/locks"
    evidence = tmp_path / "evidence"
    note = 'echo "$GPUYARD_JOB_ID'
    script = f'{note} start $(hostname) $(cat {_BOOT})" >> {evidence}; sleep 0.3; {note} end" >> {evidence}'
    submitted, chance = 0, random.Random(7)
    for number in range(size(8, full=50)):
        on = alpha if number == 0 else chance.choice((alpha, bravo))
        act = "submit" if number == 0 else chance.choice(("submit", "submit", "queue", "start", "kill", "power"))
        if act == "kill":
            alpha.shell(f"kill -9 $(cut -d' ' -f1 {alpha.home}/.local/state/gpuyard/daemon.lock)")
        elif act == "power":
            on.power_off()
            on.boot()
        else:
            submit = ("submit", "--on-reboot", "requeue", "--", "sh", "-c", script)
            done = on.gpuyard(*{"submit": submit, "queue": ("queue",), "start": ("daemon", "start")}[act])
            assert (done.returncode == 0) is (on is alpha), (act, done.stderr)
            submitted += act == "submit" and on is alpha
    waited = alpha.gpuyard("wait", "all", "--timeout", "80s")
    assert waited.returncode == 0, alpha.gpuyard("queue", "--all").stdout + alpha.gpuyard("leases").stdout
    lines = [line.split() for line in evidence.read_text().splitlines()]
    starts = [(line[0], line[3]) for line in lines if line[1] == "start"]
    assert not [line for line in lines if "bravo" in line]
    assert len(set(starts)) == len(starts), "a job ran twice in one start of the machine"
    assert {int(job) for job, what, *_ in lines if what == "end"} == set(range(1, submitted + 1))
