"""Suspend, resume and preempt on the command line: real jobs on a simulated card."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.fakes import gated_job, parking_job
from tests.fakes.queue_command import run, run_here
from tests.integration.queue_fixture import QueueUnderTest, until

# Small enough for the RAM of any machine that runs tests.
CARD, LARGE_MB = "1x2GB", 1500.0
ROUNDED_S = 0.005  # times are given in milliseconds


@pytest.fixture
def card(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    """A queue with one card, that keeps no RAM free."""
    monkeypatch.setenv("GPUYARD_SIMULATE", CARD)
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text("[suspend]\nram_reserve_mb = 0\n")
    own_queue.start()
    return own_queue


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file for which jobs of `submit` wait before they end."""
    return tmp_path / "gate"


@pytest.fixture
def open_gate(tmp_path: Path) -> Path:
    """An existing gate: jobs end as soon as their work is done."""
    path = tmp_path / "open-gate"
    path.touch()
    return path


def submit(gate: Path, *options: str) -> int:
    """Submit a job that fills the card, ends once `gate` exists, and prints a checksum of its work last."""
    need = f"{LARGE_MB:g}"
    result = run_here("submit", *options, "--vram", f"{need}M", "--", *gated_job.COMMAND, "--vram", need, str(gate))
    assert (result.returncode, result.stderr) == (0, "")
    return int(result.stdout)


def begin(card: QueueUnderTest, gate: Path, *options: str) -> int:
    """Submit a job and wait until it holds its memory."""
    job_id = submit(gate, *options)
    until(lambda: peak(card, job_id) == LARGE_MB, f"the memory of job {job_id}")
    return job_id


def peak(card: QueueUnderTest, job_id: int) -> float:
    attempts = card.job(job_id)["attempts"]
    return max(attempts[-1]["peaks_mb"].values(), default=0.0) if attempts else 0.0


def history_of(job_id: int) -> list[str]:
    return [event["kind"] for event in json.loads(run_here("history", str(job_id), "--json").stdout)["events"]]


def states() -> list[tuple[int, str]]:
    return [(row["id"], row["state"]) for row in json.loads(run_here("queue", "--json").stdout)["jobs"]]


def time_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def work_done(card: QueueUnderTest, job_id: int, attempt: int = 1) -> str:
    return card.log_of(job_id, attempt).splitlines()[-1]


def test_a_suspended_job_frees_its_memory_and_continues_after_resume_when_memory_is_free(
    card: QueueUnderTest, gate: Path, open_gate: Path
) -> None:
    job_id = begin(card, gate)
    assert run_here("suspend", str(job_id)).stdout == f"suspending {job_id}\n"
    card.until_state(job_id, "suspended")
    why = run_here("why", str(job_id)).stdout
    assert why == f"job {job_id} is suspended\n  suspended by hand: `gpuyard resume {job_id}` continues it\n"
    assert "moved to RAM" in run_here("queue").stdout
    other = begin(card, gate)
    assert states() == [(other, "running"), (job_id, "suspended")]
    assert run_here("resume", str(job_id)).stdout == f"will resume when memory is free: {job_id}\n"
    why = run_here("why", str(job_id)).stdout
    assert why.startswith(f"job {job_id} is suspended, and waits for free memory to continue: ")
    assert f"job {other} (" in why
    assert f"too little free memory beside job {other} (" in run_here("queue", str(job_id)).stdout
    assert "548 MB free, 1.5 GB needed" in run_here("why", "-v", str(job_id)).stdout
    gate.touch()
    assert run_here("wait").returncode == 0
    assert history_of(job_id) == [
        "submitted",
        "started",
        "suspending",
        "suspended",
        "resume",
        "resuming",
        "resumed",
        "ended",
    ]
    undisturbed = submit(open_gate)
    card.wait(undisturbed)
    assert work_done(card, job_id) == work_done(card, undisturbed)
    ran = card.job(job_id)
    suspended_s, took_s = ran["attempts"][0]["suspended_s"], time_of(ran["ended_at"]) - time_of(ran["started_at"])
    assert suspended_s > 0
    assert ran["elapsed_s"] == pytest.approx(took_s - suspended_s, abs=ROUNDED_S), "suspended time does not count"
    assert "suspended for" in run_here("show", str(job_id)).stdout


def test_an_urgent_job_runs_at_once_and_the_suspended_job_continues(
    card: QueueUnderTest, gate: Path, open_gate: Path
) -> None:
    victim = begin(card, gate)
    urgent = submit(open_gate, "--preempt")
    assert run_here("wait", str(urgent)).returncode == 0
    assert card.job(urgent)["priority"] == 100
    gate.touch()
    assert run_here("wait", str(victim)).returncode == 0
    assert history_of(victim) == ["submitted", "started", "suspending", "suspended", "resuming", "resumed", "ended"]
    assert f"preempted by job {urgent}" in run_here("history", str(victim)).stdout
    assert card.job(victim)["attempt"] == 1
    assert work_done(card, victim) == work_done(card, urgent)


def test_an_urgent_job_prefers_a_victim_that_parks_its_memory_and_runs_beside_the_rest(
    own_queue: QueueUnderTest, gate: Path, open_gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first victim holds less, and so would be cheaper to suspend if the other could not park."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x4GB")
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text("[suspend]\nram_reserve_mb = 0\n")
    own_queue.start()
    plain = begin(own_queue, gate)
    size = f"{LARGE_MB + 300:g}"
    command = (*parking_job.COMMAND, "--vram", size, str(gate))
    parks = int(run_here("submit", "--vram", f"{size}M", "--", *command).stdout)
    until(lambda: peak(own_queue, parks) == LARGE_MB + 300, "the memory of the job that parks")
    urgent = submit(open_gate, "--preempt")
    assert run_here("wait", str(urgent)).returncode == 0
    gate.touch()
    assert run_here("wait").returncode == 0
    assert "moved to RAM by the program itself in " in run_here("history", str(parks)).stdout
    assert history_of(plain) == ["submitted", "started", "ended"]
    assert own_queue.log_of(parks, 1).splitlines() == ["holding", "parked", "returned", "done"]


def test_a_job_may_be_preempted_by_requeueing(card: QueueUnderTest, gate: Path, open_gate: Path) -> None:
    victim = begin(card, gate, "--on-preempt", "requeue")
    urgent = submit(open_gate, "--preempt")
    assert run_here("wait", str(urgent)).returncode == 0
    gate.touch()
    assert run_here("wait").returncode == 0
    preempted = card.job(victim)
    assert [one["outcome"] for one in preempted["attempts"]] == ["preempted", "succeeded"]
    assert preempted["failures"] == 0
    assert work_done(card, victim, 2) == work_done(card, urgent)
    assert "if preempted: requeue\n" in run_here("show", str(victim)).stdout
    assert "preempts: jobs of lower priority\n" in run_here("show", str(urgent)).stdout


def test_why_names_a_running_job_that_cannot_be_preempted(card: QueueUnderTest, gate: Path, open_gate: Path) -> None:
    stubborn = begin(card, gate, "--on-preempt", "never")
    urgent = submit(open_gate, "--preempt")
    until(
        lambda: "preempting jobs of lower priority would not free enough" in run_here("why", str(urgent)).stdout,
        "the reason",
    )
    assert card.state(urgent) == "queued"
    gate.touch()
    assert run_here("wait").returncode == 0
    assert history_of(stubborn) == ["submitted", "started", "ended"]
    assert history_of(urgent) == ["submitted", "started", "ended"]


def test_why_names_the_job_that_is_being_preempted(card: QueueUnderTest, open_gate: Path, tmp_path: Path) -> None:
    exit_gate, up = card.gate("exit"), tmp_path / "up"
    # After SIGTERM the job ends only once its gate opens.
    asked = f"trap 'read word < {exit_gate}; exit' TERM; touch {up}"
    victim = card.shell(f"{asked}; while :; do sleep 0.05; done", on_preempt="requeue")
    until(up.exists, "a job that handles SIGTERM")
    urgent = submit(open_gate, "--preempt")
    leaving = f"job {victim} is being stopped for it"
    until(lambda: leaving in run_here("why", str(urgent)).stdout, "the preempted job")
    assert "it starts as soon as they have freed their memory" in run_here("why", str(urgent)).stdout
    assert leaving in run_here("queue", str(urgent)).stdout
    exit_gate.write_text("go\n")
    assert run_here("wait", str(urgent)).returncode == 0


def test_draining_waits_for_resuming_jobs_but_not_for_jobs_suspended_by_a_user(
    card: QueueUnderTest, gate: Path
) -> None:
    job_id = begin(card, gate)
    run_here("suspend", str(job_id))
    card.until_state(job_id, "suspended")
    assert run_here("drain", "--wait").stdout.startswith("drained: no job runs")
    assert card.state(job_id) == "suspended"
    gate.touch()
    assert run_here("resume", str(job_id)).returncode == 0
    assert run_here("drain", "--wait").stdout.startswith("drained: no job runs")
    assert card.state(job_id) == "succeeded"


def test_a_suspended_job_survives_the_daemon_and_can_be_cancelled(card: QueueUnderTest, gate: Path) -> None:
    job_id = begin(card, gate)
    run_here("suspend", str(job_id))
    card.until_state(job_id, "suspended")
    card.restart()
    assert states() == [(job_id, "suspended")]
    assert run_here("cancel", str(job_id)).stdout == f"cancelled {job_id}\n"
    card.until_state(job_id, "cancelled")


def test_suspend_and_resume_report_jobs_that_they_cannot_change(card: QueueUnderTest, gate: Path) -> None:
    job_id = begin(card, gate)
    waiting = submit(gate)
    without, cpu_gate = card.start_gated("cpu", gpus=0)
    for verb, which, message in (
        ("suspend", waiting, "it is queued: only running jobs can be suspended"),
        ("suspend", without, "it holds no GPU memory"),
        ("resume", job_id, "it is running, not suspended"),
    ):
        result = run_here(verb, str(which))
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(f"gpuyard: {which} is unchanged: ")
        assert message in result.stderr
    assert run_here("suspend", "99").returncode == 3
    cpu_gate.write_text("go\n")


def test_a_job_is_not_suspended_without_enough_free_ram(card: QueueUnderTest, gate: Path) -> None:
    job_id = begin(card, gate)
    (card.home / "config.toml").write_text("[suspend]\nram_reserve_mb = 1000000000\n")
    card.restart()
    result = run_here("suspend", str(job_id))
    assert result.returncode == 1
    assert "of RAM are available, " in result.stderr
    gate.touch()
    assert run_here("wait", str(job_id)).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-preempt", "maybe"], "suspend, requeue, never"),
        (["--preempt", "--gpus", "0"], "--gpus 0 asks for none"),
    ],
)
def test_invalid_preemption_options_are_rejected(
    card: QueueUnderTest, options: list[str], message: str, tmp_path: Path
) -> None:
    result = run("submit", *options, "--", "true", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert card.counts() == {}
